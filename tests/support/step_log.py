"""What the scheduler decided while an engine ran: the proof that a test's switch acted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import SequenceStatus
from tpengine.scheduling.step import SchedulerOutput


@dataclass
class StepLog:
    """Counts over all steps of all engines since the log was opened."""

    num_partial_chunks: int = 0
    """Rows that computed a part of their tokens and left some for later steps."""
    num_mixed_steps: int = 0
    """Steps with rows of one token and longer rows."""
    num_preemptions: int = 0
    num_swapped: int = 0
    """Preemptions that moved blocks to the host."""
    num_recomputed: int = 0
    """Preemptions that gave blocks up."""
    max_rows: int = 0
    max_tokens: int = 0

    def assert_only(self, mode: str, at_least: int = 1) -> None:
        """Makes sure that preemption acted, and in this of its modes alone."""
        counts = {"swap": self.num_swapped, "recompute": self.num_recomputed}
        acted = counts.pop(mode)
        assert acted == self.num_preemptions >= at_least, f"{acted} preemptions by {mode}"
        assert not any(counts.values())

    def record(self, output: SchedulerOutput) -> None:
        """Adds one step, as scheduled."""
        self.num_preemptions += len(output.preempted)
        for request in output.preempted:
            statuses = {sequence.status for sequence in request.sequences}
            self.num_swapped += SequenceStatus.SWAPPED in statuses
            self.num_recomputed += SequenceStatus.WAITING in statuses
        if not output.rows:
            return
        sizes = output.step_input.num_scheduled_tokens
        for sequence, end in zip(output.rows, output.num_computed_tokens, strict=True):
            self.num_partial_chunks += end < sequence.num_tokens
        self.num_mixed_steps += min(sizes) == 1 and max(sizes) > 1
        self.max_rows = max(self.max_rows, len(sizes))
        self.max_tokens = max(self.max_tokens, sum(sizes))


@contextmanager
def log_steps() -> Iterator[StepLog]:
    """Watches every scheduler while the context lasts."""
    log = StepLog()
    schedule = Scheduler.schedule

    def watched(scheduler: Scheduler, is_alone: bool = False) -> SchedulerOutput:
        output = schedule(scheduler, is_alone)
        log.record(output)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", watched)
        yield log
