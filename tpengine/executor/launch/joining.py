"""The moments in which a group's ranks connect: whoever is lost meanwhile is found at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tpengine.executor.channel import Channel
from tpengine.executor.diagnosis import Coroner
from tpengine.executor.handshake import Listener, RanksMissingError, accept_all
from tpengine.executor.launch.actor_calls import ActorCalls, CallsFailedError
from tpengine.executor.watch import FROZEN_S, RankSilentError

_LOOK_S = 1.0
"""Between two looks at the processes of ranks that do not come."""


def accept_ranks(
    listeners: Sequence[Listener],
    calls: ActorCalls,
    refs: Sequence[Any],
    coroner: Coroner,
    wait_s: float,
    check: Callable[[], None],
) -> list[list[Channel]]:
    """Each listener's channels of the ranks, which have been told to connect.

    Args:
        refs: Ray's references to their answers, in rank order.
        check: called again and again while ranks are missing; what it raises ends the wait.

    Raises:
        CallsFailedError: a rank could not connect, died, is stopped, or did not come in time.
    """
    start = time.monotonic()
    next_look = start + FROZEN_S

    def look() -> None:
        nonlocal next_look
        check()
        done = calls.check_started(refs)
        if time.monotonic() < next_look:
            return
        for rank in set(range(len(refs))) - done:
            if coroner.is_stopped(rank):
                silent_s = time.monotonic() - start
                raise CallsFailedError({rank: RankSilentError(f"silent for {silent_s:.1f} s")})
        next_look = time.monotonic() + _LOOK_S

    try:
        return accept_all(listeners, len(refs), wait_s, look)
    except RanksMissingError as error:
        raise CallsFailedError(dict.fromkeys(error.ranks, error)) from error
