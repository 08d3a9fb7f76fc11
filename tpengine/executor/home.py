"""What an executor needs of the place where its ranks run, as a cluster of Ray or this machine.

A `Home` places, starts and kills processes, and is the same for all groups of an executor, until
another one takes over. It knows nothing of steps and calls: these are frames on the channels that
`Home.start` returns.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from tpengine.config import EngineConfig
from tpengine.errors import EngineError
from tpengine.executor.channel import Channel, Check
from tpengine.executor.diagnosis import NodeAgents, RankPlace
from tpengine.executor.spares import Spares

_LEAST_APPEAR_S, _APPEAR_PATIENCE = 25.0, 5.0
"""What the processes of a later group get to appear: at the least, and in multiples of the first's
time. Ray may have to end a stopped process first, which takes it five seconds."""
PROCESSES = "processes"


class Start:
    """The start of ranks that goes on, or else the latest one.

    Args:
        limit_s: of any call in a start.
        check: called during everything that may take long; an exception of it ends the wait.

    Attributes:
        seconds: of each phase that has ended, in order.
        phase_now: the phase that goes on; None: none does.
        appear_s: how long new processes may take to tell where they are. Until then they cannot be
            looked at. The first ones may take as long as the user allows; of a later group, one
            that takes far longer than the first did is frozen and must not delay the rebuild.
        deadline: by the monotonic clock, at which every wait of the start ends, so that ranks that
            have not answered are lost. Infinity: each wait has only its own limit.
    """

    def __init__(self, limit_s: float, check: Check) -> None:
        self.check = check
        self.seconds: dict[str, float] = {}
        self.phase_now: str | None = None
        self.appear_s = limit_s
        self.deadline = math.inf

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

    def at_most(self, limit_s: float) -> float:
        """Seconds that a wait with this limit may take now."""
        return max(0.0, min(limit_s, self.deadline - time.monotonic()))


Started = tuple[RankPlace, Sequence[Channel]]
"""A process: where it is, and its channels for steps and for heartbeats."""


class Lost(Protocol):
    """What is left of a group that was lost.

    Attributes:
        places: where its ranks were; empty: they have not told.
    """

    places: list[RankPlace]

    def end(self, silent: Iterable[str] = ()) -> None:
        """Ends it, except on these nodes, which do not answer."""


def keeps_memory(config: EngineConfig) -> bool:
    """Whether ranks can have memory that outlives them. On GPUs no card has run it yet, so the user
    has to ask for it; and a wait in NCCL is not called off, so that there is only one rank."""
    parallel = config.parallel
    is_asked = parallel.own_processes.keep_kv == "always"
    return config.device == "cpu" or (is_asked and parallel.world_size == 1)


class Home:
    """Where the groups of an executor run.

    Attributes:
        agents: of the ranks' nodes.
        keeps_memory: whether what a rank holds in its memory outlives its process.
        spares: processes from which later groups get their ranks.
    """

    agents: NodeAgents
    keeps_memory: bool
    spares: Spares[Any]

    def check(self) -> None:
        """Raises EngineError if ranks can neither run nor be started here any more."""

    def place(self, start: Start) -> None:
        """Finds places for the first group.

        Raises:
            PlacementError: there is no room.
        """

    def has_room(self, num_more: int, check: Check) -> bool:
        """Whether there are places for so many more ranks now; waits a few seconds at most.

        Args:
            check: called during everything that may take long; an exception of it ends the wait.
        """
        raise NotImplementedError

    def replace(self, size: int, lost: Lost, start: Start) -> None:
        """Ends the last group, and makes sure of places for the next one.

        Args:
            size: number of its ranks.
            start: the wait for room ends at its deadline, as another number of ranks would do.

        Raises:
            PlacementError: there is no room without the nodes that were lost.
        """
        with start.phase("end"):
            lost.end()

    def prepare(self, kept: frozenset[int] | None = None) -> None:
        """Prepares the processes of the next group, with spares where there are some.

        Args:
            kept: ranks of the latest group that go on as they are; the others get the memory of
                those that they replace. None: all begin anew.
        """
        raise NotImplementedError

    def start(self, epoch: int, timeout_s: float, check: Check) -> list[Started]:
        """Starts the processes and connects the driver with them; returns them in rank order.

        Args:
            timeout_s: for them to tell where they are, and to connect.
            check: see `has_room`.

        Raises:
            RanksFailedError: a process has ended, does not tell, or cannot connect; by its number,
                in any order.
        """
        raise NotImplementedError

    def kill(self) -> None:
        """Ends the processes of the latest group without waiting, also those that are stopped."""
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
