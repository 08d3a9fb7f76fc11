"""Divides the running sequences into groups, so that each stage of a pipeline has work.

The token after a sampled one can enter the first stage when the last stage has sampled, so a
sequence has a row in every `num_stages`-th step at most. A step therefore takes sequences that the
latest steps do not sample, and no more of them than a fair part, so that others are left for the
next steps. The parts of a prompt wait for no sample: they follow each other through the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tpengine.scheduling.sequence import Request
from tpengine.scheduling.sequence import Sequence as TokenSequence
from tpengine.scheduling.step import SchedulerOutput, StepBuilder

_TOKENS_PER_ROW = 4096
"""Tokens whose attention in a decode costs about as much as all else that a row computes."""


class StageGroups:
    """Says which running requests have their turn in a step.

    Args:
        num_stages: 2 or more.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._resting: set[TokenSequence] = set()
        self._share = self._limit = 0.0  # of the step that is being chosen, in rows
        self._taken, self._num_counted = 0.0, 0
        self._excess = 0.0

    def begin_step(self, running: Iterable[Request], unanswered: Sequence[SchedulerOutput]) -> None:
        """Begins a step that takes a fair part of what the latest steps do not sample.

        Args:
            unanswered: steps that were sent, oldest first.
        """
        latest = islice(reversed(unanswered), self._num_stages - 1)
        self._begin(running, {sequence for step in latest for sequence in step.sampled})

    def begin_idle_step(self, running: Sequence[Request]) -> None:
        """The same, if all that has its turn waits for its samples: a sequence may then wait for
        its own sample in the first stage, but only for one."""
        sequences = (s for request in running for s in request.running_sequences)
        self._begin(running, {s for s in sequences if s.num_in_flight > 1})

    def _begin(self, running: Iterable[Request], resting: set[TokenSequence]) -> None:
        self._resting = resting
        rows = (s for request in running for s in request.running_sequences if s.num_behind == 1)
        self._share = sum(map(_cost, rows)) / self._num_stages
        # What the last step took too much, this one takes less, so that parts are fair on average.
        self._limit = self._share - self._excess
        self._taken, self._num_counted = 0.0, 0

    def has_turn(self, request: Request, step: StepBuilder) -> bool:
        """Whether a running request may have rows in a step, after those that it has already."""
        if not self._resting.isdisjoint(request.sequences):
            return False
        self._count(step)
        rows = [s for s in request.running_sequences if s.num_behind == 1]
        return not (rows and self._taken) or self._taken + sum(map(_cost, rows)) / 2 <= self._limit

    def end_step(self, step: StepBuilder) -> None:
        """Takes the step as it is sent."""
        self._count(step)
        self._excess = min(self._share, max(self._taken - self._limit, -0.5))

    def _count(self, step: StepBuilder) -> None:
        self._taken += sum(_cost(sequence) for sequence, _ in step.singles[self._num_counted :])
        self._num_counted = len(step.singles)


def _cost(sequence: TokenSequence) -> float:
    """What a row of one token costs, in rows of short sequences."""
    return 1.0 + sequence.num_tokens / _TOKENS_PER_ROW
