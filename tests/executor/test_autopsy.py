"""What a loss is said to be, by what the rank's node still answers."""

from __future__ import annotations

from typing import Any

from tpengine.errors import RankLoss
from tpengine.executor.channel import ChannelClosedError, ChannelTimeoutError
from tpengine.executor.diagnosis import Coroner, Doing
from tpengine.executor.failures import RankFailure
from tpengine.executor.launch.node_agent import NodeSilentError
from tpengine.executor.launch.placement import RankPlace

DOING = Doing("execute_model", 5)
CLOSED = ChannelClosedError("the peer closed the connection")


class ScriptedAgents:
    """Agents that know these answers, and are silent to all else."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.num_starting = 0

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = 2.0) -> Any:
        if method not in self._answers:
            raise NodeSilentError(f"node {node_id} does not answer within {timeout_s:g} s")
        return self._answers[method]

    def is_starting(self, node_id: str) -> bool:
        return self.num_starting > 0


def explain(failure: Any, **answers: Any) -> RankLoss:
    places = [RankPlace("n", "10.0.0.1", "host", (), 1, 1)] * 3
    coroner = Coroner(ScriptedAgents(**answers), 1, places)  # type: ignore[arg-type]
    return coroner.explain(1, failure, DOING, "")


def test_known_cause_stays_when_the_log_is_not_to_be_had() -> None:
    loss = explain(CLOSED, look=("killed by signal 9 (SIGKILL)", ""))
    assert loss.cause == "killed by signal 9 (SIGKILL)"
    assert "does not answer" in loss.last_lines
    loss = explain(ChannelTimeoutError("silent for 3.1 s"), look=("", "T"), tail="last words")
    assert loss.cause == "silent for 3.1 s (frozen: its process is stopped)"
    assert "(no stack: node n does not answer within 3 s)" in loss.stack
    assert loss.last_lines == "last words"


def test_silent_node_is_the_cause() -> None:
    loss = explain(CLOSED)
    assert loss.cause.startswith("its node does not answer: the peer closed the connection")
    assert loss.last_lines == loss.stack == ""


def test_wait_for_nobody_knows_whom() -> None:
    """As gloo among three says it."""
    failure = RankFailure(1, "here", "step 5", "CollectiveError", "a peer is gone", "", [])
    loss = explain(failure)
    assert loss.rank == 1
    assert loss.cause == "waited in vain; which rank did not come is unknown (a peer is gone)"
