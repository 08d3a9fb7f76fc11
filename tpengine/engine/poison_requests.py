"""Which request it is that kills the ranks, when the same ones are there each time.

A loss in the middle of a step may be an accident, or the work of a request that no rank survives.
Requests of a lost step are suspects until they have got past the point at which they were. Those
that two losses found at the same point are put on trial: halves of them run while all others wait,
and a half that loses the group is halved again, down to a request that does so alone, twice. In
between those whom at most one loss speaks against run for some steps, where there are any: a group
that is lost with them, too, dies of something else, and the first time did not count. Whoever gets
past its point is cleared. So accidents beside a trial make it longer, and seldom wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tpengine.sequence import Request

_LOSSES_BEFORE_TRIAL = 2
_LOSSES_ALONE = 2
"""One may be an accident."""
_CONTROL_STEPS = 16
"""In which whatever kills ranks at every turn would have shown itself."""


@dataclass(slots=True, eq=False)
class _Suspect:
    """A request whose last steps were lost.

    Attributes:
        points: tokens that each of its sequences had then, by the sequence's id.
        num_losses: since it last got past such a point.
        num_alone: those of them in which nobody else was there, on trial.
    """

    request: Request
    points: dict[int, int] = field(default_factory=dict)
    num_losses: int = 0
    num_alone: int = 0

    def note_loss(self) -> None:
        self.num_losses += 1
        self.points = {s.seq_id: s.num_tokens for s in self.request.unfinished_sequences}

    @property
    def is_past(self) -> bool:
        """Whether all of its sequences have got further than they were, or have ended."""
        return all(
            sequence.status.finished or sequence.num_tokens > self.points[sequence.seq_id]
            for sequence in self.request.sequences
            if sequence.seq_id in self.points
        )


_Group = list[_Suspect]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a loss is put down to.

    Attributes:
        convicted: the request that loses the group whenever it runs.
        is_probe: the loss was one of the few that it takes to find such a request.
    """

    convicted: Request | None = None
    is_probe: bool = False


class Blame:
    """Follows losses and progress; says who may run.

    A trial may take as many losses as halving needs, and that many again whenever a suspect was
    cleared meanwhile. More of them are not its doing: they count like any other.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}
        self._groups: list[_Group] = []  # of the trial; the last one runs
        self._control: list[Request] = []  # runs instead while there is any
        self._control_steps = 0
        self._probes_left = 0

    @property
    def has_suspects(self) -> bool:
        """Whether progress matters; without suspects there is nothing to note."""
        return bool(self._suspects)

    @property
    def allowed(self) -> frozenset[str] | None:
        """Ids of the requests that may run; None: there is no trial."""
        if not self._groups:
            return None
        if self._control:
            return frozenset(request.request_id for request in self._control)
        return frozenset(suspect.request.request_id for suspect in self._groups[-1])

    def note_step(self) -> None:
        """Notes that a step was completed."""
        self._control_steps += bool(self._control)

    def note_loss(self, requests: Iterable[Request], unfinished: Iterable[Request]) -> Verdict:
        """Books a loss in a step.

        Args:
            requests: those of the step.
            unfinished: all that there are.
        """
        self.note_progress()
        present = [self._suspect(request) for request in requests if not request.finished]
        for suspect in present:
            suspect.note_loss()
        if not self._groups:
            self._open_trial(present)
            return Verdict()
        if self._control:
            self._control = []
            for suspect in self._groups[-1]:
                suspect.num_alone = 0
            return Verdict()
        group = self._groups.pop()
        blamed = [suspect for suspect in group if suspect in present]
        self._push([suspect for suspect in group if suspect not in present])
        convicted = None
        if len(present) == len(blamed) == 1:
            (alone,) = blamed
            alone.num_alone += 1
            if alone.num_alone == _LOSSES_ALONE:
                convicted = alone.request
                del self._suspects[convicted.request_id]
            else:
                self._push(blamed)
                self._control = [r for r in unfinished if self._is_above_suspicion(r)]
                self._control_steps = 0
        else:
            self._push_halves(blamed)
        is_probe = self._probes_left > 0
        self._probes_left -= is_probe
        return Verdict(convicted, is_probe)

    def note_progress(self) -> bool:
        """Clears suspects that got past their point or have ended; returns whether that changed
        `allowed`."""
        before = self.allowed
        cleared = [suspect for suspect in self._suspects.values() if suspect.is_past]
        if cleared:
            self._clear(cleared)
        is_over = self._control_steps >= _CONTROL_STEPS or not self._groups
        if is_over or all(request.finished for request in self._control):
            self._control = []
        return self.allowed != before

    def _clear(self, cleared: _Group) -> None:
        for suspect in cleared:
            del self._suspects[suspect.request.request_id]
        was_on_trial = any(suspect in group for group in self._groups for suspect in cleared)
        # Members that are cleared run on beside the others of their group, as long as it runs.
        self._groups = [
            group
            for group in self._groups
            if any(suspect.request.request_id in self._suspects for suspect in group)
        ]
        if was_on_trial:
            self._probes_left = self._num_probes()

    def _suspect(self, request: Request) -> _Suspect:
        known = self._suspects.get(request.request_id)
        if known is None or known.request is not request:
            known = self._suspects[request.request_id] = _Suspect(request)
        return known

    def _is_above_suspicion(self, request: Request) -> bool:
        suspect = self._suspects.get(request.request_id)
        if suspect is None:
            return True
        is_accused = any(suspect in group for group in self._groups)
        return not is_accused and suspect.num_losses < _LOSSES_BEFORE_TRIAL

    def _open_trial(self, present: _Group) -> None:
        accused = [s for s in present if s.num_losses >= _LOSSES_BEFORE_TRIAL]
        self._push_halves(accused)
        self._probes_left = self._num_probes()

    def _push(self, group: _Group) -> None:
        group = [s for s in group if self._suspects.get(s.request.request_id) is s]
        if group:
            self._groups.append(group)

    def _push_halves(self, group: _Group) -> None:
        middle = (len(group) + 1) // 2
        self._push(group[middle:])
        self._push(group[:middle])

    def _num_probes(self) -> int:
        """Losses that finding one among all suspects of the trial takes."""
        count = sum(len(group) for group in self._groups)
        return count.bit_length() + _LOSSES_ALONE
