"""A rank that cannot connect names the failed rank, and leaves no open descriptors."""

from __future__ import annotations

import os
import pickle
import signal
import time

import pytest

from distributed.ranks import Rank, Ranks, Task, connect_by_any_means
from tpengine.distributed.rendezvous import Meeting
from tpengine.errors import RendezvousError
from tpengine.executor.diagnosis import RankFailure
from tpengine.messages import Rendezvous

FAILS_S = 10.0


def connect_and_count(state: Rank, rendezvous: Rendezvous) -> tuple[int, RankFailure]:
    """Returns the number of descriptors that a failed connection leaves open, and its failure."""
    before = len(os.listdir("/proc/self/fd"))
    try:
        connect_by_any_means(state, rendezvous)
    except RendezvousError as error:
        name, message = type(error).__name__, str(error)
        culprit = error.failed_rank
        failure = RankFailure(state.rank, "here", "connect", name, message, "", [], culprit)
    return len(os.listdir("/proc/self/fd")) - before, failure


def meet(state: Rank, rendezvous: Rendezvous) -> None:
    state.kept["meeting"] = Meeting(state.rank, rendezvous, None)


def say(state: Rank) -> None:
    """Publishes more than once: the first message to a process that has just died may be sent."""
    for _ in range(5):
        state.kept["meeting"].publish("seen", b"1")
        time.sleep(0.05)


def listen(state: Rank) -> None:
    state.kept["meeting"].read("segment", 0)


def give_up(state: Rank) -> str:
    """Reports a failure of this rank; it must not raise even if rank 0 is gone."""
    state.kept["meeting"].fail("seen", ZeroDivisionError("no remainder"))
    return "told"


def test_missing_rank_is_the_failed_rank(two: Ranks) -> None:
    two.start(0, connect_and_count, two.rendezvous(connect_timeout_s=1.0))
    num_left, failure = two.outcome(0, FAILS_S)
    assert num_left == 0, "a failed connection leaves descriptors"
    assert failure.is_consequence
    assert failure.waited_for == 1


@pytest.mark.parametrize("task", [say, listen])
def test_rank_0_that_dies_is_the_failed_rank(task: Task, two: Ranks) -> None:
    """The store dies with rank 0: the others fail when they publish or read."""
    two.start(1, meet, two.rendezvous(connect_timeout_s=5.0))
    assert two.outcome(1, FAILS_S) is None
    two.signal(0, signal.SIGKILL)
    two.processes[0].join(FAILS_S)
    two.start(1, task)
    error = two.outcome(1, FAILS_S)
    assert isinstance(error, RendezvousError), repr(error)
    assert error.failed_rank == 0
    assert "lost rank 0's store" in str(error)
    two.start(1, give_up)
    assert two.outcome(1, FAILS_S) == "told"


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RendezvousError("rank 3 is missing", 3)))
    assert (str(error), error.failed_rank) == ("rank 3 is missing", 3)
