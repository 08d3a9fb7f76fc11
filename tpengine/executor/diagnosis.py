"""How a rank failed or ended: what it reported, and what its node tells of its process.

The rank's own exception travels as a `RankFailure`. For a rank that reports nothing, the agent of
its node is asked: how the process ended or what it is doing, its stack, the end of its log. Of
several ranks that fail together, `RanksFailedError.cause` decides whose failure explains the
others.
"""

from __future__ import annotations

import collections
import logging
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tpengine import errors
from tpengine.errors import EngineError, RankLoss, TemporaryError, WorkerError
from tpengine.executor.channel import ChannelClosedError, ChannelError
from tpengine.host import NO_DESCRIPTORS

ANSWER_S = 2.0
"""How long a node may take to answer before it counts as gone."""
AGENT_START_S = 15.0
"""How long a node's agent may take to answer at first, as its process has to start."""
HOLD_S = 10.0
"""How long a rank may be silent while its process runs: native code may hold Python's lock, and
the machine may be busy."""
DRIVER_GONE, DRIVER_SILENT = 3, 4
"""Exit codes of a rank that ends itself."""
_STACK_S = 3.0
_END_S = 0.5
"""How long it may take from the end of a rank's connection to that of its process."""
_LOG_LINES = 20
STOPPED = ("", "T", "t")
"""Letters for the state of a process that is gone or stopped."""
UNKNOWN = "?"
_STATES = {
    UNKNOWN: "its state is unknown, as there is no file descriptor left to look",
    "": "its process is gone",
    "T": "frozen: its process is stopped",
    "t": "frozen: a debugger holds its process",
    "D": "its process waits for a disk or device",
    "R": "its process is computing",
    "S": "its process sleeps",
}
_OWN_ENDS = {
    f"exit code {DRIVER_GONE}": "it ended itself, as the driver's end of its channel had closed",
    f"exit code {DRIVER_SILENT}": "it ended itself, as it heard nothing from the driver",
}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where the process of a rank runs.

    Attributes:
        address: of its node.
        devices: ids of its accelerators.
        start_ticks: start time of the process in clock ticks since boot, which tells it from a
            later one with the same number.
        log_path: the process's error log on its node, empty if unknown.
    """

    node_id: str
    address: str
    host_name: str
    devices: tuple[str, ...]
    pid: int
    start_ticks: int
    log_path: str = ""

    @property
    def process(self) -> tuple[int, int]:
        """What tells the process from all others of its node."""
        return self.pid, self.start_ticks

    def __str__(self) -> str:
        devices = f", device {','.join(self.devices)}" if self.devices else ""
        return f"node {self.address} ({self.host_name}), pid {self.pid}{devices}"


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """The file of what outlives a rank's process, which its node's agent holds.

    Attributes:
        path: by which processes of the node open it.
        target: what this path leads to, if it is still that file.
        engine_id, epoch: the engine that it belongs to, and in which its content began.
    """

    path: str
    target: str
    engine_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception on a rank, as plain data: `RankFailure(*dataclasses.astuple(failure))` is equal.

    Attributes:
        place: host, node address and process, for people.
        phase: the method that failed.
        log_lines: the rank's last log lines.
        waited_for: the rank that seems to be at fault; None: this one, or not known.
        shortage: error number of what its machine lacked; None: nothing, or not known.
    """

    rank: int
    place: str
    phase: str
    type_name: str
    message: str
    traceback: str
    log_lines: list[str]
    waited_for: int | None = None
    shortage: int | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only noticed that another one had gone."""
        return self.type_name in ("CollectiveError", "RendezvousError")

    @property
    def error_type(self) -> type[EngineError] | None:
        """The exception's type, if it is an engine error of `tpengine.errors`."""
        kind = getattr(errors, self.type_name, None)
        return kind if isinstance(kind, type) and issubclass(kind, EngineError) else None

    @property
    def is_permanent(self) -> bool:
        """Whether another start would fail in the same way. Any exception that is no engine error
        may come from the machine."""
        kind = self.error_type
        is_final = kind is not None and not issubclass(kind, TemporaryError)
        return is_final and self.shortage is None

    def to_error(self) -> EngineError:
        """The exception to raise: of the rank's own type if that is an engine error. It names the
        rank; the rank's traceback and log lines stand in its cause."""
        where = f"[rank {self.rank} on {self.place}, in {self.phase}]"
        report = [f"traceback of rank {self.rank} on {self.place}:", self.traceback.rstrip()]
        if self.log_lines:
            report += [f"last log lines of rank {self.rank}:", *self.log_lines]
        cause = WorkerError("\n".join(report))
        if self.shortage in NO_DESCRIPTORS:  # then the first start is tried again, too
            cause.__cause__ = OSError(self.shortage, "the rank had no file descriptor left")
        text = f"{self.type_name}: {self.message} {where}"
        error: EngineError
        if self.error_type is None:
            error = WorkerError(f"{text}\n{cause}")
        else:
            try:
                error = self.error_type(f"{self.message} {where}")
            except TypeError:  # its constructor needs more than a message
                error = WorkerError(text)
        error.__cause__ = cause
        return error


Failure = RankFailure | ChannelError
"""The rank's own exception, or what happened to its channel or process."""


class RanksFailedError(EngineError):
    """Ranks failed in a step or in a call.

    Attributes:
        failures: by rank, in order of arrival.
    """

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        super().__init__(f"ranks {sorted(failures)} failed")
        self.failures = dict(failures)

    @property
    def cause(self) -> int:
        """The rank whose failure explains the others.

        A rank's own exception explains more than a broken connection, and that more than a rank's
        report that another rank is missing; and this explains least if the other one has reported
        the same of a third. Of equals the first one counts.
        """

        def weight(rank: int) -> int:
            failure = self.failures[rank]
            if not isinstance(failure, RankFailure):
                return 1
            if not failure.is_consequence:
                return 0
            return 3 if failure.waited_for in self.failures else 2

        return min(self.failures, key=weight)


class LastLines(logging.Handler):
    """Keeps the last log lines of a rank, which are sent with a failure.

    Attributes:
        lines: oldest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record)[:1000])


class NodeSilentError(TemporaryError):
    """A node does not answer."""


class NodeAgents(Protocol):
    """The agents that act on processes of other nodes: methods of `launch.node_agent.NodeAgent`."""

    def open(self, node_ids: Iterable[str]) -> None:
        """Starts the agents of nodes that have none, without waiting for them."""

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Calls a method of a node's agent; raises NodeSilentError without an answer in time."""

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        """Calls a method of a node's agent without waiting for its answer."""

    def is_starting(self, node_id: str) -> bool:
        """Whether the agent may still be starting, so that its silence tells nothing."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a group is doing, as its driver knows it.

    Attributes:
        phase: `execute_model`, `idle`, or a call of the start.
        step: the step that runs; None: no step runs.
    """

    phase: str
    step: int | None = None


IDLE = Doing("idle")
START = Doing("start")
"""Until all processes of the ranks have told where they are."""


class Diagnosis:
    """Explains the losses of one group.

    Args:
        places: in rank order; empty: not known.
    """

    def __init__(self, agents: NodeAgents, epoch: int, places: Sequence[RankPlace]) -> None:
        self._agents = agents
        self._epoch = epoch
        self._places = list(places)

    def is_frozen(self, rank: int, silent_s: float, may_hold: bool) -> bool:
        """Whether a silent rank counts as lost: its process is stopped or gone, its node does not
        answer, or it has been silent for more than `HOLD_S`.

        Args:
            may_hold: whether it may be silent without limit while its process runs, as when it
                connects or imports libraries.
        """
        place = self._places[rank]
        try:
            state = self._agents.ask(place.node_id, "state", place.process)
        except NodeSilentError:
            return not self._agents.is_starting(place.node_id)
        return state in STOPPED or (silent_s >= HOLD_S and not may_hold)

    def kill_lost(self, rank: int) -> frozenset[int]:
        """Kills a lost rank, and all others that are stopped or gone; returns these ranks.

        Raises:
            NodeSilentError: a node does not answer, so that its ranks may live.
            EngineError: a process does not end, so that it may still write into its memory.
        """
        lost = {rank}
        for other, place in enumerate(self._places):
            if self._agents.ask(place.node_id, "state", place.process) in STOPPED:
                lost.add(other)
        for place in (self._places[rank] for rank in lost):
            self._agents.tell(place.node_id, "signal", place.process, signal.SIGKILL)
        for place in (self._places[rank] for rank in lost):
            if self._agents.ask(place.node_id, "wait_for_end", [place.process], ANSWER_S / 2):
                raise EngineError(f"{place} does not end within {ANSWER_S / 2:g} s of SIGKILL")
        return frozenset(lost)

    def has_broken_code(self, rank: int) -> bool:
        """Whether a rank has ended by a fault of its own code, or it is not known; such code may
        have written anywhere."""
        place = self._places[rank]
        answer: bool = self._agents.ask(place.node_id, "has_broken_code", place.process, _END_S)
        return answer

    def explain(self, rank: int, failure: Failure, doing: Doing, last_phase: str) -> RankLoss:
        """Says why a rank was lost; or the rank that it waited for, if it names one.

        Args:
            last_phase: what the rank was doing by its last heartbeat; empty if unknown.
        """
        if not isinstance(failure, RankFailure):
            if not self._places:
                return self.loss_of(rank, doing, str(failure))
            is_closed = isinstance(failure, ChannelClosedError)
            reason = str(failure)
            if not is_closed and last_phase:
                reason += f", its last heartbeat said {last_phase}"
            return self._of_process(rank, reason, doing, is_closed)
        if not failure.is_consequence:
            cause = f"raised {failure.type_name}: {failure.message}"
        elif failure.waited_for is not None:
            reason = f"rank {rank} waited for it in vain ({failure.message})"
            return self._of_process(failure.waited_for, reason, doing, is_closed=False)
        else:
            cause = f"waited in vain; which rank did not come is unknown ({failure.message})"
        lines = "\n".join(failure.log_lines)
        return self.loss_of(rank, doing, cause, lines, failure.traceback.rstrip())

    def _of_process(self, rank: int, reason: str, doing: Doing, is_closed: bool) -> RankLoss:
        place = self._places[rank]
        patience_s = _END_S if is_closed else 0.0
        try:
            ended, state = self._agents.ask(place.node_id, "look", place.process, patience_s)
        except NodeSilentError as error:
            return self.loss_of(rank, doing, f"its node does not answer: {reason}; {error}")
        if ended:
            cause = f"{ended}: {_OWN_ENDS[ended]}" if ended in _OWN_ENDS else ended
        elif is_closed:
            cause = f"{_STATES.get(state, state)}: {reason}"
        else:
            cause = f"{reason} ({_STATES.get(state, state)})"
        stack = ""
        if not ended and state:
            stack = self._text(place.node_id, "stack", place.process, _STACK_S)
        lines = self._text(place.node_id, "tail", place.log_path, ANSWER_S)
        return self.loss_of(rank, doing, cause, lines, stack)

    def loss_of(
        self, rank: int, doing: Doing, cause: str, last_lines: str = "", stack: str = ""
    ) -> RankLoss:
        """The loss of a rank of which this is known; asks no node."""
        place = f"process {rank} that has not told where it is"
        place = str(self._places[rank]) if self._places else place
        step, phase = doing.step, doing.phase
        return RankLoss(rank, place, self._epoch, step, phase, cause, last_lines, stack)

    def _text(self, node_id: str, method: str, what: object, timeout_s: float) -> str:
        """A text that explains more. Without it the cause is known all the same."""
        try:
            text: str = self._agents.ask(node_id, method, what, timeout_s=timeout_s)
        except NodeSilentError as error:
            return f"(no {method}: {error})"
        return text
