"""Calls of Ray's to all actors of a group at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tpengine.errors import EngineError
from tpengine.executor.channel import ChannelClosedError, ChannelError, ChannelTimeoutError
from tpengine.executor.failures import RankFailure

_GRACE_S = 1.0
"""How long other ranks are heard after the first failure of a call."""
_SLICE_S = 0.2
"""Between two looks at whether the wait still makes sense."""


class CallsFailedError(EngineError):
    """Ranks failed in a call.

    Attributes:
        failures: by rank, in order of arrival: its exception, or what became of its process.
    """

    def __init__(self, failures: dict[int, RankFailure | ChannelError]) -> None:
        super().__init__(f"ranks {sorted(failures)} failed in a call")
        self.failures = failures


class ActorCalls:
    """The actors of a group, in the order of its ranks once that is known.

    Args:
        timeout_s: of any call.
        check: called again and again while answers are missing; what it raises ends the wait.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float, check: Callable[[], None]) -> None:
        self._actors = list(actors)
        self._timeout_s = timeout_s
        self._check = check

    def in_order(self, order: Sequence[int], timeout_s: float) -> ActorCalls:
        """The same actors in another order, and another timeout."""
        return ActorCalls([self._actors[i] for i in order], timeout_s, self._check)

    def start(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """Calls all without waiting; Ray's references in rank order."""
        return [call(rank, actor) for rank, actor in enumerate(self._actors)]

    def run(self, call: Callable[[int, Any], Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """Calls all, or only some, at once; answers in the order of the ranks.

        Raises:
            CallsFailedError: a rank failed, has gone, or did not answer in time.
        """
        chosen = range(len(self._actors)) if ranks is None else ranks
        rank_of = {call(rank, self._actors[rank]): rank for rank in chosen}
        deadline = time.monotonic() + self._timeout_s
        answers: dict[int, Any] = {}
        failures: dict[int, RankFailure | ChannelError] = {}
        waiting = list(rank_of)
        while waiting and time.monotonic() < deadline:
            left = max(0.0, deadline - time.monotonic())
            ready, waiting = ray.wait(waiting, timeout=min(_SLICE_S, left))
            for ref in ready:
                answer = self._result(ref)
                if isinstance(answer, (RankFailure, ChannelError)):
                    failures[rank_of[ref]] = answer
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    answers[rank_of[ref]] = answer
            if waiting:
                self._check()
        if waiting and not failures:
            reason = (
                f"no answer within {self._timeout_s:.0f} s: it is frozen, or its machine very slow "
                "(start_timeout_s bounds a first start; a later one has a multiple of the first)"
            )
            failures = {rank_of[ref]: ChannelTimeoutError(reason) for ref in waiting}
        if failures:
            raise CallsFailedError(failures)
        return [answers[rank] for rank in chosen]

    def check_started(self, refs: Sequence[Any]) -> set[int]:
        """Looks at calls that `start` began, without waiting; returns the ranks that are done.

        Raises:
            CallsFailedError: one of them failed.
        """
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        done = {rank: self._result(ref) for rank, ref in enumerate(refs) if ref in ready}
        failures = {r: a for r, a in done.items() if isinstance(a, (RankFailure, ChannelError))}
        if failures:
            raise CallsFailedError(failures)
        return set(done)

    def _result(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._timeout_s)
        except RayActorError as error:
            return ChannelClosedError(f"Ray says: {error}")
        except (RayError, GetTimeoutError) as error:
            return ChannelError(str(error))

    def kill(self) -> None:
        """Has Ray end all."""
        if ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(Exception):  # another cluster knows nothing of it
                    ray.kill(actor, no_restart=True)
