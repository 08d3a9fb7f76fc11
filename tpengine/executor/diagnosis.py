"""Finds out what became of a rank: by its node's agent, its process, its log and its stack."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from tpengine.errors import RankLoss
from tpengine.executor.channel import ChannelClosedError, ChannelError
from tpengine.executor.failures import RankFailure
from tpengine.executor.launch.node_agent import ANSWER_S, Agents, NodeSilentError
from tpengine.executor.launch.placement import RankPlace
from tpengine.executor.watch import HOLD_S

_STACK_S = 3.0
_END_S = 0.5
"""How long it may take from the end of a rank's connection to that of its process."""
_STATES = {
    "": "its process is gone",
    "T": "frozen: its process is stopped",
    "t": "frozen: a debugger holds its process",
    "D": "its process waits for a disk or device",
    "R": "its process is computing",
    "S": "its process sleeps",
}
_OWN_ENDS = {
    "exit code 3": "exit code 3: it ended itself, as the driver's end of its channel had closed",
    "exit code 4": "exit code 4: it ended itself, as it heard nothing from the driver",
}


@dataclass(frozen=True, slots=True)
class Doing:
    """What a group is doing, as its driver knows it.

    Attributes:
        phase: `execute_model`, `idle`, or a call of the start.
        step: that runs; None: none does.
    """

    phase: str
    step: int | None = None


IDLE = Doing("idle")


class Coroner:
    """Explains the losses of one group.

    Args:
        places: in rank order.
    """

    def __init__(self, agents: Agents, epoch: int, places: Sequence[RankPlace]) -> None:
        self._agents = agents
        self._epoch = epoch
        self._places = list(places)

    def is_frozen(self, rank: int, silent_s: float, may_hold: bool) -> bool:
        """Whether a rank that is silent counts as lost: its process is stopped or gone, its node
        does not answer, or it has been silent for too long whatever it does.

        Args:
            may_hold: whether it may be silent for as long as it wants, as when it imports.
        """
        place = self._places[rank]
        try:
            state = self._agents.ask(place.node_id, "state", place.process)
        except NodeSilentError:
            return not self._agents.is_starting(place.node_id)
        if state in ("", "T", "t"):
            return True
        return silent_s >= HOLD_S and not may_hold

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank's process is stopped or gone; a node that does not say is given time, as
        its agent may only be starting."""
        place = self._places[rank]
        with contextlib.suppress(NodeSilentError):
            return self._agents.ask(place.node_id, "state", place.process) in ("", "T", "t")
        return False

    def explain(
        self, rank: int, failure: RankFailure | ChannelError, doing: Doing, said: str
    ) -> RankLoss:
        """What became of a rank; of the one that it waited for, if it says so.

        Args:
            said: what the rank was doing by its own last word.
        """
        if isinstance(failure, RankFailure):
            if failure.is_consequence and failure.waited_for is not None:
                waited_for = failure.waited_for
                reason = f"rank {rank} waited for it in vain ({failure.message})"
                return self._of_process(waited_for, reason, doing, is_closed=False)
            cause = f"raised {failure.type_name}: {failure.message}"
            if failure.is_consequence:
                cause = f"waited in vain; which rank did not come is unknown ({failure.message})"
            return RankLoss(
                rank=rank,
                place=str(self._places[rank]),
                epoch=self._epoch,
                step=doing.step,
                phase=doing.phase,
                cause=cause,
                last_lines="\n".join(failure.log_lines),
                stack=failure.traceback.rstrip(),
            )
        closed = isinstance(failure, ChannelClosedError)
        reason = str(failure)
        if not closed and said:
            reason += f", its last beat said {said}"
        return self._of_process(rank, reason, doing, closed)

    def _of_process(self, rank: int, reason: str, doing: Doing, is_closed: bool) -> RankLoss:
        place = self._places[rank]
        lines = stack = ""
        try:
            patience_s = _END_S if is_closed else 0.0
            ended, state = self._agents.ask(place.node_id, "look", place.process, patience_s)
        except NodeSilentError as error:
            cause = f"its node does not answer: {reason}; {error}"
        else:
            if ended:
                cause = _OWN_ENDS.get(ended, ended)
            elif is_closed:
                cause = f"{_STATES.get(state, state)}: {reason}"
            else:
                cause = f"{reason} ({_STATES.get(state, state)})"
            if not ended and state:
                stack = self._text(place.node_id, "stack", place.process, _STACK_S)
            lines = self._text(place.node_id, "tail", place.log_path, ANSWER_S)
        return RankLoss(
            rank=rank,
            place=str(place),
            epoch=self._epoch,
            step=doing.step,
            phase=doing.phase,
            cause=cause,
            last_lines=lines,
            stack=stack,
        )

    def _text(self, node_id: str, method: str, what: object, timeout_s: float) -> str:
        """Something that explains more; that it is not to be had changes nothing of the cause."""
        try:
            text: str = self._agents.ask(node_id, method, what, timeout_s=timeout_s)
        except NodeSilentError as error:
            return f"(no {method}: {error})"
        return text
