"""Which silence is a loss, what a loss is said to be, and whose failure explains the others'."""

from __future__ import annotations

import dataclasses
import errno
from dataclasses import replace
from typing import Any

import pytest

from tpengine.errors import ModelLoadError, RankLoss, is_shortage
from tpengine.executor.channel import ChannelClosedError, ChannelTimeoutError
from tpengine.executor.codec import decode_plain, encode
from tpengine.executor.diagnosis import (
    HOLD_S,
    Diagnosis,
    Doing,
    LastLines,
    NodeSilentError,
    RankFailure,
    RankPlace,
    RanksFailedError,
)
from tpengine.executor.rank import Rank
from tpengine.executor.watch import FROZEN_S

DOING = Doing("execute_model", 5)
CLOSED = ChannelClosedError("the peer closed the connection")


class ScriptedAgents:
    """Agents that give these answers, and do not answer other questions."""

    def __init__(self, is_starting: bool = False, **answers: Any) -> None:
        self._answers = answers
        self._is_starting = is_starting

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = 2.0) -> Any:
        if method not in self._answers:
            raise NodeSilentError(f"node {node_id} does not answer within {timeout_s:g} s")
        return self._answers[method]

    def is_starting(self, node_id: str) -> bool:
        return self._is_starting


def diagnosis(**answers: Any) -> Diagnosis:
    places = [RankPlace("n", "10.0.0.1", "host", (), 1, 1)] * 3
    return Diagnosis(ScriptedAgents(**answers), 1, places)  # type: ignore[arg-type]


def explain(failure: Any, **answers: Any) -> RankLoss:
    return diagnosis(**answers).explain(1, failure, DOING, "")


def test_known_cause_stays_without_a_log() -> None:
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


def test_wait_for_an_unknown_rank() -> None:
    """As gloo reports it among three ranks."""
    loss = explain(RankFailure(1, "here", "step 5", "CollectiveError", "a peer is gone", "", []))
    assert loss.rank == 1
    assert loss.cause == "waited in vain; which rank did not come is unknown (a peer is gone)"


@pytest.mark.parametrize("state", ["T", "t", ""])
def test_stopped_or_gone_is_lost_at_once(state: str) -> None:
    assert diagnosis(state=state).is_frozen(0, FROZEN_S, may_hold=True)


@pytest.mark.parametrize("state", ["R", "S", "D"])
def test_silent_process_that_runs_is_given_time(state: str) -> None:
    """Native code may hold Python's lock; only connecting and imports may do so without limit."""
    rank = diagnosis(state=state)
    assert not rank.is_frozen(0, HOLD_S - 0.1, may_hold=False)
    assert rank.is_frozen(0, HOLD_S, may_hold=False)
    assert not rank.is_frozen(0, 10 * HOLD_S, may_hold=True)


def test_silent_node() -> None:
    """A silent rank on it is lost, unless the node's agent may still be starting."""
    assert diagnosis().is_frozen(0, FROZEN_S, may_hold=True)
    assert not diagnosis(is_starting=True).is_frozen(0, HOLD_S, may_hold=False)


def raised(rank: int, type_name: str) -> RankFailure:
    return RankFailure(rank, "here", "step 1", type_name, "text", "", [])


def test_whose_failure_explains_the_others() -> None:
    """A rank's own error, then a connection that broke, then a report that another rank is missing;
    the first of equals."""
    own, lonely = raised(2, "ValueError"), raised(0, "CollectiveError")
    assert RanksFailedError({0: lonely, 1: CLOSED, 2: own}).cause == 2
    assert RanksFailedError({0: lonely, 1: CLOSED}).cause == 1
    assert RanksFailedError({1: raised(1, "RendezvousError"), 0: lonely}).cause == 1
    assert RanksFailedError({1: CLOSED, 0: CLOSED}).cause == 1
    # The next stage notices first that rank 0 has left, which had waited for rank 1 in vain.
    third = replace(raised(2, "CollectiveError"), waited_for=0)
    assert RanksFailedError({2: third, 0: replace(lonely, waited_for=1)}).cause == 0


def test_what_a_machine_lacked_travels_with_the_failure() -> None:
    """A rank whose model cannot be read for want of a descriptor is started again."""
    rank = object.__new__(Rank)  # without its process
    rank._rank, rank.place, rank._log = 0, None, LastLines()
    for cause, may_pass, is_tried_at_the_start in (
        (OSError(errno.EMFILE, "Too many open files"), True, True),
        (OSError(errno.ENFILE, "Too many open files in system"), True, True),
        (MemoryError(), True, False),
        (OSError(errno.ENOENT, "No such file"), False, False),
    ):
        error = ModelLoadError("model.safetensors cannot be read")
        error.__cause__ = cause
        sent = encode(dataclasses.astuple(rank.failure(error, "load_model")))
        failure = RankFailure(*decode_plain(sent))
        assert failure.is_permanent != may_pass
        assert is_shortage(failure.to_error()) == is_tried_at_the_start
