"""The bounded queue before the scheduler: who may wait, and how many."""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait for its first step; more is refused at once with `QueueFullError`.

    Attributes:
        max_requests: most requests that have not started.
        max_tokens: most prompt tokens of those; a single request that is longer is taken when
            nothing else waits.

    Raises:
        ConfigError: a limit is below 1.
    """

    max_requests: int = 256
    max_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"QueueLimits.{name} must be at least 1, got {getattr(self, name)}"
                )
