"""Finds a request that kills every rank that runs it.

A rank lost in the middle of a step may be an accident, or one request of the step may be the cause.

1. Every request of a lost step is a suspect until it gets past its point: the number of tokens that
   it had in that step.
2. Suspects that two losses found at the same point are isolated: one half of them runs while all
   other requests wait. A half that loses the ranks is halved again, down to one request. Other
   suspects get past their point and are cleared.
3. A request that loses the ranks twice while it runs alone is the culprit, and fails. Between these
   two losses, requests that are not suspected run for some steps as a control. If the ranks are
   lost in the control too, the cause is another one, and the first of the two does not count.

One culprit among 64 suspects is found in at most seven rebuilds: five for halves of 32 to 2
requests, two for the request alone. Accidents meanwhile make the search longer, and seldom wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tpengine.errors import RankLoss, counted
from tpengine.logger import init_logger
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.step import SchedulerOutput

logger = init_logger(__name__)

_LOSSES_BEFORE_ISOLATION = 2
_LOSSES_ALONE = 2
_CONTROL_STEPS = 16


@dataclass(slots=True, eq=False)
class _Suspect:
    """A request whose last step was lost.

    Attributes:
        points: number of tokens of each sequence in that step, by the sequence's id.
        num_losses: since the request last got past such a point.
        num_alone: those of them in which it ran alone, in isolation.
    """

    request: Request
    points: dict[int, int] = field(default_factory=dict)
    num_losses: int = 0
    num_alone: int = 0

    def note_loss(self) -> None:
        self.num_losses += 1
        self.points = {s.seq_id: s.num_tokens for s in self.request.unfinished_sequences}

    @property
    def is_probable(self) -> bool:
        """Whether enough losses found it at the same point to isolate it."""
        return self.num_losses >= _LOSSES_BEFORE_ISOLATION

    @property
    def is_cleared(self) -> bool:
        """Whether all of its sequences have got past their points, or have ended."""
        return all(
            sequence.status.finished or sequence.num_tokens > self.points[sequence.seq_id]
            for sequence in self.request.sequences
            if sequence.seq_id in self.points
        )


class PoisonSearch:
    """Follows losses and progress, and says which requests may run.

    An isolation may need as many losses as halving takes, and as many again each time a suspect was
    cleared in between. Further losses count like any other, so that the search ends if the requests
    are not the cause.

    Attributes:
        suspects: by request id.
        control: requests that run instead of the isolated ones; empty if those may run.
    """

    def __init__(self) -> None:
        self.suspects: dict[str, _Suspect] = {}
        self._groups: list[list[_Suspect]] = []  # in isolation; the last one runs
        self.control: list[Request] = []
        self._num_control_steps = 0
        self._num_losses_left = 0

    @property
    def allowed(self) -> frozenset[str] | None:
        """Ids of the requests that may run; None: all may, there is no isolation."""
        if not self._groups:
            return None
        running = self.control or [suspect.request for suspect in self._groups[-1]]
        return frozenset(request.request_id for request in running)

    def note_step(self) -> None:
        """Counts a completed step."""
        self._num_control_steps += bool(self.control)

    def note_progress(self) -> bool:
        """Clears suspects that got past their points or have finished.

        Returns:
            Whether `allowed` has changed.
        """
        if not self.suspects:
            return False
        before = self.allowed
        self.suspects = {i: s for i, s in self.suspects.items() if not s.is_cleared}
        groups = [[s for s in group if not s.is_cleared] for group in self._groups]
        if groups != self._groups:
            self._groups = [group for group in groups if group]
            self._num_losses_left = self._num_losses_needed()
        is_over = self._num_control_steps >= _CONTROL_STEPS or not self._groups
        if is_over or all(request.finished for request in self.control):
            self.control = []
        return self.allowed != before

    def note_loss(
        self, loss: RankLoss, lost: Collection[SchedulerOutput], unfinished: Sequence[Request]
    ) -> tuple[Request | None, bool]:
        """Takes note of a loss, before its requests are scheduled anew.

        Args:
            lost: the steps that were sent and not answered.
            unfinished: all unfinished requests.

        Returns:
            The culprit if it is known now; and whether the search needs this loss, which then does
            not count against `max_recoveries`.
        """
        finding: tuple[Request | None, bool] = None, False
        # A rank lost before the step was sent has not run it: its requests are no suspects.
        if loss.step in {output.step_input.step for output in lost}:
            self.note_progress()
            rows = {sequence.seq_id for output in lost for sequence in output.rows}
            awaiting = {request.request_id for output in lost for request in output.awaiting}
            present = [
                request
                for request in unfinished
                if request.request_id in awaiting
                or any(sequence.seq_id in rows for sequence in request.sequences)
            ]
            for request in present:
                self.suspects.setdefault(request.request_id, _Suspect(request)).note_loss()
            finding = self._decide([self.suspects[r.request_id] for r in present], unfinished)
        if self._groups:
            logger.warning(
                "%d of %s may run while others wait, to find out whether one of them loses the "
                "ranks",
                len(self.allowed or ()),
                counted(len(unfinished), "request"),
            )
        return finding

    def _decide(
        self, present: list[_Suspect], unfinished: Sequence[Request]
    ) -> tuple[Request | None, bool]:
        """Decides which group runs next; returns what `note_loss` does.

        Args:
            present: the requests of the lost step.
        """
        if not self._groups:
            self._isolate(*_halves([suspect for suspect in present if suspect.is_probable]))
            self._num_losses_left = self._num_losses_needed()
            return None, False
        if self.control:
            self.control = []
            for suspect in self._groups[-1]:
                suspect.num_alone = 0
            return None, False
        group = self._groups.pop()
        suspects = [suspect for suspect in group if suspect in present]
        self._isolate([suspect for suspect in group if suspect not in present])
        culprit = None
        if len(present) == len(suspects) == 1:
            (alone,) = suspects
            alone.num_alone += 1
            if alone.num_alone == _LOSSES_ALONE:
                culprit = alone.request
                del self.suspects[culprit.request_id]
            else:
                self._isolate(suspects)
                probable = {i for i, suspect in self.suspects.items() if suspect.is_probable}
                self.control = [r for r in unfinished if r.request_id not in probable]
                self._num_control_steps = 0
        else:
            self._isolate(*_halves(suspects))
        is_isolation_step = self._num_losses_left > 0
        self._num_losses_left -= is_isolation_step
        return culprit, is_isolation_step

    def _isolate(self, *groups: list[_Suspect]) -> None:
        self._groups += [group for group in groups if group]

    def _num_losses_needed(self) -> int:
        """Losses that it takes to find one culprit among all isolated suspects."""
        return sum(map(len, self._groups)).bit_length() + _LOSSES_ALONE


def _halves(group: list[_Suspect]) -> tuple[list[_Suspect], list[_Suspect]]:
    middle = (len(group) + 1) // 2
    return group[middle:], group[:middle]
