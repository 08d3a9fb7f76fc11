"""Calls of Ray's with a time bound. Ray itself waits without one while its control store (GCS) is
dead or frozen.

A call runs in a thread of its own. If it does not return in time, the thread is abandoned: the
caller gets an error, and what the call brings later is undone.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import ray

from tpengine.errors import TemporaryError
from tpengine.host import run_in_thread

Answer = TypeVar("Answer")

RAY_CALL_S = 30.0
"""How long a call may take. On a busy machine some take seconds."""
_ANSWER_S = 10.0
"""How long the control store may take to answer the simplest question."""
_CONNECT_S = 2.0
_RETURN_S = 2.0
"""How long a call waits for abandoned ones to return: if they do not, it would hang as well."""

_abandoned: set[Future[Any]] = set()


class RaySilentError(TemporaryError):
    """Ray does not answer. Steps do not need it; to start a rank, it has to answer again."""


def bounded(
    call: Callable[[], Answer],
    what: str,
    undo: Callable[[Answer], object] = lambda answer: None,
    limit_s: float | None = None,
    is_last: bool = False,
) -> Answer:
    """Returns what a call of Ray's returns.

    Args:
        what: the call asks for, for the error.
        undo: called with the answer of a call that was abandoned.
        limit_s: None: `RAY_CALL_S`.
        is_last: made also while an abandoned one has not returned.

    Raises:
        RaySilentError: it has not returned in time.
    """
    if not is_last and wait(tuple(_abandoned), _RETURN_S).not_done:
        raise RaySilentError(f"Ray was not asked for {what}: it still does not answer")
    limit_s = RAY_CALL_S if limit_s is None else min(limit_s, RAY_CALL_S)
    answer = run_in_thread(call, "tpengine-ray-call")
    is_done = False
    try:
        is_done = bool(wait([answer], limit_s).done)
    finally:  # also after a Ctrl-C
        if not is_done:
            _abandoned.add(answer)
            answer.add_done_callback(partial(_end_abandoned, undo))
    if not is_done:
        raise RaySilentError(
            f"Ray did not answer within {limit_s:g} s, when asked for {what}: its control store "
            "(gcs_server) is dead, frozen or cannot be reached; requests go on while their ranks "
            "live, but no rank can be started: start Ray again, or wait until it answers"
        )
    return answer.result()


def check_new(address: str) -> None:
    """Makes sure that a control store answers, before this process connects to it: one that is
    frozen accepts the connection, and `ray.init` waits.

    Raises:
        RaySilentError: it does not answer.
    """
    bounded(lambda: ray._raylet.GcsClient(address=address), "its address")


def check_answers() -> None:
    """Makes sure, within seconds, that Ray's control store answers.

    Raises:
        RaySilentError: it is dead, frozen, or cannot be reached.
    """
    store: str = ray.get_runtime_context().gcs_address
    host, _, port = store.rpartition(":")
    try:  # a dead one refuses at once; Ray's own calls would wait for it to come back
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except ConnectionError as error:
        raise RaySilentError(
            f"Ray's control store (gcs_server) at {store} is dead: {error}"
        ) from error
    except OSError:  # that this process has no descriptor left is no fault of Ray's
        pass
    bounded(ray.nodes, "its nodes", limit_s=_ANSWER_S)


def _end_abandoned(undo: Callable[[Any], object], answer: Future[Any]) -> None:
    """Runs in the abandoned thread."""
    _abandoned.discard(answer)
    if answer.exception() is None:
        with contextlib.suppress(Exception):
            undo(answer.result())
