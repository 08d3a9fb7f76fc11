"""The bounded queue before the scheduler: how many requests and prompt tokens may wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from tpengine.errors import ConfigError, QueueFullError

_HISTORY = 64
_LOOK_S = 0.02
"""Least time between searches through a full queue: there may be thousands of refusals between two
steps."""
_UNKNOWN_RETRY_S = 1.0
_RETRY_RANGE_S = (0.1, 30.0)


class Waiting(Protocol):
    """What this module needs to know of a request; compared by identity."""

    @property
    def phase(self) -> str:
        """How far it has come: "queued" until its first step."""
        ...


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

    The event loop enters requests, the engine's thread starts them: a lock guards the counts.
    """

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        # By object, not by id: an aborted request may still be here when the next request with its
        # id comes.
        self._tokens: dict[Waiting, int] = {}
        self._num_tokens = 0
        self._starts: deque[float] = deque(maxlen=_HISTORY)
        self._looked_at = -_LOOK_S

    @property
    def num_requests(self) -> int:
        """Requests that have not started."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Their prompt tokens, as far as they have been counted."""
        return self._num_tokens

    def enter(self, request: Waiting) -> None:
        """Gives a request a place before its prompt is tokenized: a refusal must be cheap.

        Raises:
            QueueFullError: `max_requests` wait already.
        """
        with self._lock:
            if len(self._tokens) >= self._limits.max_requests:
                self._look_for_room()
            if len(self._tokens) >= self._limits.max_requests:
                raise QueueFullError(
                    f"{len(self._tokens)} requests wait already, and no more than "
                    f"{self._limits.max_requests} may; try again later",
                    self._retry_after_s(),
                )
            self._tokens[request] = 0

    def charge(self, request: Waiting, num_tokens: int) -> None:
        """Counts the prompt tokens of a request; takes it out of the queue if they are too many.

        Raises:
            QueueFullError: with them, more than `max_tokens` would wait.
        """
        with self._lock:
            if request not in self._tokens:
                return
            if self._num_tokens + num_tokens > self._limits.max_tokens:
                self._look_for_room()
            if self._num_tokens and self._num_tokens + num_tokens > self._limits.max_tokens:
                del self._tokens[request]
                raise QueueFullError(
                    f"{self._num_tokens} prompt tokens wait already; with {num_tokens} more they "
                    f"would exceed the {self._limits.max_tokens} that may; try again later",
                    self._retry_after_s(),
                )
            self._tokens[request] = num_tokens
            self._num_tokens += num_tokens

    def drop_started(self) -> None:
        """Takes out the requests that have started; called after each step."""
        if self._tokens:
            with self._lock:
                self._drop_started(time.monotonic())

    def leave(self, request: Waiting) -> None:
        """Takes out a request that has ended; nothing happens if it had started."""
        with self._lock:
            self._num_tokens -= self._tokens.pop(request, 0)

    def _look_for_room(self) -> None:
        """Counts requests out while their first step is being computed. The engine's thread calls
        `drop_started` only after that step, which may be long."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._drop_started(now)

    def _drop_started(self, now: float) -> None:
        for request in tuple(self._tokens):
            if request.phase != "queued":
                self._num_tokens -= self._tokens.pop(request)
                self._starts.append(now)

    def _retry_after_s(self) -> float:
        """Estimates when the present queue has started, from the pace of the last starts."""
        if len(self._starts) < 2:
            return _UNKNOWN_RETRY_S
        pace_s = (time.monotonic() - self._starts[0]) / len(self._starts)
        low, high = _RETRY_RANGE_S
        return min(high, max(low, pace_s * len(self._tokens)))
