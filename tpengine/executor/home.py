"""What an executor needs of the place where its ranks run, as a cluster of Ray or this machine.

A `Home` places, starts and kills processes, and is the same for all groups of an executor, until
another one takes over; a `Launcher` does so for one group. Both know nothing of steps and calls:
these are frames on the channels that `Launcher.start` returns.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tpengine.errors import EngineError
from tpengine.executor.channel import Channel, Check
from tpengine.executor.diagnosis import NodeAgents, RankPlace
from tpengine.executor.spares import Spares

_LEAST_APPEAR_S, _APPEAR_PATIENCE = 25.0, 5.0
"""What the processes of a later group get to appear: at the least, and in multiples of the first's
time. Ray may have to end a stopped process first, which takes it five seconds."""
PROCESSES = "processes"


class StartTimes:
    """The seconds of each phase of the latest start, and the phase that goes on.

    Args:
        limit_s: of any call in a start.

    Attributes:
        seconds: by phase, in order.
        phase_now: the phase that goes on; None: none does.
        appear_s: how long new processes may take to tell where they are. Until then they cannot be
            looked at. The first ones may take as long as the user allows; of a later group, one
            that takes far longer than the first did is frozen and must not delay the rebuild.
    """

    def __init__(self, limit_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self.phase_now: str | None = None
        self.appear_s = limit_s

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the time in the context, however it ends."""
        start, self.phase_now = time.monotonic(), name
        try:
            yield
        finally:
            self.seconds[name], self.phase_now = time.monotonic() - start, None

    def note_first(self) -> None:
        """Takes the first start, which succeeded, as the measure of later ones."""
        patience_s = max(_LEAST_APPEAR_S, _APPEAR_PATIENCE * self.seconds[PROCESSES])
        self.appear_s = min(self.appear_s, patience_s)


Places = Sequence[RankPlace]
EndGroup = Callable[[set[str]], None]
"""Ends what is left of a group, except on these nodes, which do not answer."""
Started = tuple[RankPlace, Sequence[Channel]]
"""A process: where it is, and its channels for steps and for heartbeats."""


class Launcher(Protocol):
    """Starts the processes of a group's ranks, and ends them; with Ray also those of the later
    groups that keep some of them."""

    @property
    def keeps_memory(self) -> bool:
        """Whether what a rank holds in its memory outlives its process."""

    @property
    def agents(self) -> NodeAgents:
        """The agents of the ranks' nodes."""

    def start(self, epoch: int, timeout_s: float, check: Check) -> list[Started]:
        """Starts the processes and connects the driver with them; returns them in rank order.

        Args:
            timeout_s: for them to tell where they are, and to connect.
            check: called repeatedly meanwhile; an exception of it ends the wait.

        Raises:
            RanksFailedError: a process has ended, does not tell, or cannot connect; by its number,
                in any order.
        """

    def kill(self) -> None:
        """Ends all processes without waiting, also those that are stopped."""


class Home:
    """Where the groups of an executor run.

    Attributes:
        spares: processes from which later groups get their ranks.
    """

    spares: Spares

    def check(self) -> None:
        """Raises EngineError if ranks can neither run nor be started here any more."""

    def place(self, times: StartTimes, check: Check) -> None:
        """Finds places for the first group.

        Args:
            check: called during everything that may take long; an exception of it ends the wait.

        Raises:
            PlacementError: there is no room.
        """

    def has_room(self, num_more: int, check: Check) -> bool:
        """Whether there are places for so many more ranks now; waits a few seconds at most.

        Args:
            check: see `place`.
        """
        raise NotImplementedError

    def replace(
        self,
        size: int,
        lost: Places,
        end: EndGroup,
        times: StartTimes,
        check: Check,
        deadline: float = math.inf,
    ) -> None:
        """Makes sure of places for the next group.

        Args:
            size: number of its ranks.
            lost: where the ranks of the last group were; empty: they have not told.
            end: ends what is left of that group, except on these nodes, which do not answer.
            check: see `place`.
            deadline: monotonic: the wait for room ends then, as another number of ranks would do.

        Raises:
            PlacementError: there is no room without the nodes that were lost.
        """
        with times.phase("end"):
            end(set())

    def make_launcher(self, kept: frozenset[int] | None = None) -> Launcher:
        """Returns the launcher of the next group, with spares where there are some.

        Args:
            kept: ranks of the latest group that go on as they are; the others get the memory of
                those that they replace. None: all begin anew.
        """
        raise NotImplementedError

    def successor(self, error: EngineError) -> Home | None:
        """Returns the home that takes over from this one, which cannot start ranks any more; None:
        it can.

        Args:
            error: of the start that failed.
        """
        return None

    def give_places_back(self) -> None:
        """Called when a group has ended and no other one follows."""

    def close(self) -> None:
        """Ends the spares and all else that outlives a group."""
        raise NotImplementedError
