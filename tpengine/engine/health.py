"""How an engine fares: for whoever asks whether it lives and whether it may be sent requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tpengine.errors import RankLoss


class EngineState(enum.Enum):
    """What an engine does with the requests that it has."""

    RUNNING = "running"
    RECOVERING = "recovering"
    """Its ranks are gone, and new ones are on the way; requests wait."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine at a moment.

    Attributes:
        epoch: counts the groups of ranks that it has had, from 1.
        num_recoveries: groups that were rebuilt.
        last_step_age_s: seconds since a step was completed; None before the first.
        stalled_s: seconds for which there was work, or no group, and no step was completed.
        last_loss: the latest rank that was lost; None: none was.
    """

    state: EngineState
    epoch: int
    num_recoveries: int
    last_step_age_s: float | None
    stalled_s: float
    last_loss: RankLoss | None


@dataclass(slots=True)
class RecoveryRecord:
    """One recovery, for the log and for benchmarks; times in seconds.

    Attributes:
        epoch: of the new group.
        loss: what it recovered from.
        num_requests: that were carried over.
        num_attempts: at a new group; the last one succeeded.
        ready_s: from the loss's detection until a step could be scheduled.
        phases_s: what the last attempt spent that time on, where the executor knows.
        num_blocks: of the KV cache, before and after.
        longest_gap_s: between a token of a carried-over request before the loss and its next one,
            as far as they have come; None: none has had a token before and after.
    """

    epoch: int
    loss: RankLoss
    num_requests: int
    num_attempts: int
    ready_s: float
    phases_s: dict[str, float]
    num_blocks: tuple[int, int]
    longest_gap_s: float | None = None
