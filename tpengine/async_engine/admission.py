"""The bounded queue before the scheduler: how many requests and prompt tokens may wait.

When it is full, an owner still gets a place within its share of it, by the weights of the owners
that wait. So one owner cannot keep the others out, and n owners of equal weight together hold at
most ln(n) + 1 times the limits. Without `--fairness owner`, all requests have one owner.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass
from typing import Protocol

from tpengine.errors import ConfigError, QueueFullError
from tpengine.inputs import NO_OWNER, Owner

_HISTORY = 64
_LOOK_S = 0.02
"""After a search that found no started request, the next one waits at least so long: there may be
thousands of refusals between two steps."""
_UNKNOWN_RETRY_S = 1.0
_RETRY_RANGE_S = (0.1, 30.0)


class Waiting(Protocol):
    """What this module needs to know of a request; compared by identity."""

    owner: Owner

    @property
    def started_at(self) -> float | None:
        """Seconds of `time.time` at which its first step was scheduled; None before that."""
        ...


@dataclass(slots=True)
class _Held:
    """What an owner holds of the queue."""

    weight: float
    num_requests: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for its first step; more is refused at once with `QueueFullError`.

    Attributes:
        max_requests: most requests that have not started.
        max_tokens: most prompt tokens of those; a longer request is taken when no other waits.

    Raises:
        ConfigError: a limit is below 1.
    """

    max_requests: int = 256
    max_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"QueueLimits.{name} must be at least 1, got {value}")


class Admission:
    """Counts the requests that have not started.

    All of it runs on the event loop, except that any thread may read the two numbers. A request
    that has started is dropped when it finishes, or before that when a limit would be exceeded.

    Args:
        fairness: "owner" shares the queue among the owners; see `SchedulerConfig`.
    """

    def __init__(self, limits: QueueLimits, fairness: str = "none") -> None:
        self._limits = limits
        self._is_shared = fairness == "owner"
        self._held: dict[str, _Held] = {}  # by account
        # By object, not by id: an aborted request may still be here when the next request with its
        # id comes.
        self._tokens: dict[Waiting, int] = {}
        self._num_tokens = 0
        self._starts: list[float] = []
        self._found_none_at = -_LOOK_S

    @property
    def num_requests(self) -> int:
        """Requests that have not started."""
        return sum(request.started_at is None for request in self._tokens.copy())

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens, as far as they have been counted."""
        waiting = self._tokens.copy().items()
        return sum(num_tokens for request, num_tokens in waiting if request.started_at is None)

    def enter(self, request: Waiting) -> None:
        """Gives a request a place before its prompt is tokenized: a refusal must be cheap.

        Raises:
            QueueFullError: `max_requests` wait already, and its owner has its share of them.
        """
        if len(self._tokens) >= self._limits.max_requests:
            self._drop_started()
        owner, most = self._owner(request), self._limits.max_requests
        held = self._held.get(owner.account, _Held(owner.weight))
        if len(self._tokens) >= most and held.num_requests + 1 > self._share(owner, most):
            raise QueueFullError(
                f"{len(self._tokens)} requests wait already{self._part(held.num_requests)}, and no "
                f"more than {most} may; try again later",
                self._retry_after_s(),
            )
        self._tokens[request] = 0
        held.num_requests += 1
        held.weight = owner.weight
        self._held[owner.account] = held

    def charge(self, request: Waiting, num_tokens: int) -> None:
        """Counts the prompt tokens of a request that has a place.

        Raises:
            QueueFullError: with them, more than `max_tokens` would wait, and more than its owner's
                share of them would be its owner's.
        """
        if self._are_too_many(num_tokens):
            self._drop_started()
        owner, most = self._owner(request), self._limits.max_tokens
        held = self._held[owner.account]
        if self._are_too_many(num_tokens) and held.num_tokens + num_tokens > self._share(
            owner, most
        ):
            raise QueueFullError(
                f"{self._num_tokens} prompt tokens wait already{self._part(held.num_tokens)}; with "
                f"{num_tokens} more they would exceed the {most} that may; try again later",
                self._retry_after_s(),
            )
        self._tokens[request] = num_tokens
        self._num_tokens += num_tokens
        held.num_tokens += num_tokens

    def leave(self, request: Waiting) -> None:
        """Takes out a request that has finished; nothing happens if it was dropped before."""
        if request not in self._tokens:
            return
        num_tokens = self._tokens.pop(request)
        self._num_tokens -= num_tokens
        account = self._owner(request).account
        held = self._held[account]
        held.num_requests -= 1
        held.num_tokens -= num_tokens
        if not held.num_requests:
            del self._held[account]
        if request.started_at is not None:
            insort(self._starts, request.started_at)
            del self._starts[:-_HISTORY]

    def _owner(self, request: Waiting) -> Owner:
        return request.owner if self._is_shared else NO_OWNER

    def _share(self, owner: Owner, limit: int) -> float:
        """The share of an owner, which may not have a place yet."""
        others = sum(held.weight for name, held in self._held.items() if name != owner.account)
        return limit * owner.weight / (owner.weight + others)

    def _part(self, number: int) -> str:
        """What is said of the owner's part of a full queue."""
        return f", {number} of them this client's" if self._is_shared else ""

    def _are_too_many(self, num_tokens: int) -> bool:
        return self._num_tokens > 0 and self._num_tokens + num_tokens > self._limits.max_tokens

    def _drop_started(self) -> None:
        now = time.monotonic()
        if now - self._found_none_at < _LOOK_S:
            return
        started = [request for request in self._tokens if request.started_at is not None]
        for request in started:
            self.leave(request)
        if not started:
            self._found_none_at = now

    def _retry_after_s(self) -> float:
        """Estimates when the present queue has started, from the pace of the last starts."""
        if len(self._starts) < 2:
            return _UNKNOWN_RETRY_S
        pace_s = (time.time() - self._starts[0]) / len(self._starts)
        low, high = _RETRY_RANGE_S
        return min(high, max(low, pace_s * len(self._tokens)))
