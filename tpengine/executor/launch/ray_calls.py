"""Calls of Ray's with a time bound. Ray itself waits without one while its control store (GCS) is
dead or frozen.

A call runs in a thread of its own. If it does not return in time, the thread is abandoned: the
caller gets an error, and what the call brings later is undone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from tpengine.errors import TemporaryError

Answer = TypeVar("Answer")

RAY_CALL_S = 30.0
"""How long a call may take. On a busy machine some take seconds."""
_RETURN_S = 2.0
"""How long a call waits for abandoned ones to return: if they do not, it would hang as well."""

_abandoned: set[Future[Any]] = set()


class RaySilentError(TemporaryError):
    """Ray does not answer. Steps do not need it; to start a rank, it has to answer again."""


def bounded(
    call: Callable[[], Answer], what: str, undo: Callable[[Answer], object] = lambda answer: None
) -> Answer:
    """Returns what a call of Ray's returns.

    Args:
        what: the call asks for, for the error.
        undo: called with the answer of a call that was abandoned.

    Raises:
        RaySilentError: it has not returned in time.
    """
    if wait(tuple(_abandoned), _RETURN_S).not_done:
        raise RaySilentError(f"Ray was not asked for {what}: it still does not answer")
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="tpengine-ray-call", daemon=True).start()
    is_done = False
    try:
        is_done = bool(wait([answer], RAY_CALL_S).done)
    finally:  # also after a Ctrl-C
        if not is_done:
            _abandoned.add(answer)
            answer.add_done_callback(partial(_end_abandoned, undo))
    if not is_done:
        raise RaySilentError(
            f"Ray did not answer within {RAY_CALL_S:g} s, when asked for {what}: its control store "
            "(gcs_server) is dead, frozen or cannot be reached; requests go on while their ranks "
            "live, but no rank can be started: start Ray again, or wait until it answers"
        )
    return answer.result()


def _end_abandoned(undo: Callable[[Any], object], answer: Future[Any]) -> None:
    """Runs in the abandoned thread."""
    _abandoned.discard(answer)
    if answer.exception() is None:
        with contextlib.suppress(Exception):
            undo(answer.result())
