"""Whom a rank names that could not connect, and what it keeps of the attempt: nothing."""

from __future__ import annotations

import os
import pickle
import signal
import time

import pytest

from distributed.ranks import Rank, Ranks, Task, connect_whatever
from tpengine.distributed.rendezvous import Meeting
from tpengine.errors import RendezvousError
from tpengine.executor.diagnosis import RankFailure
from tpengine.messages import Rendezvous

FAILS_S = 10.0


def connect_and_count(state: Rank, rendezvous: Rendezvous) -> tuple[int, RankFailure]:
    """Descriptors that a connection leaves which fails, and how it does."""
    before = len(os.listdir("/proc/self/fd"))
    try:
        connect_whatever(state, rendezvous)
    except RendezvousError as error:
        failure = RankFailure.of(error, state.rank, "here", "connect", [])
    return len(os.listdir("/proc/self/fd")) - before, failure


def meet(state: Rank, rendezvous: Rendezvous) -> None:
    state.kept["meeting"] = Meeting(state.rank, rendezvous, None)


def say(state: Rank) -> None:
    """More than once: the kernel takes what is sent first to a process that has just died."""
    for _ in range(5):
        state.kept["meeting"].publish("seen", b"1")
        time.sleep(0.05)


def listen(state: Rank) -> None:
    state.kept["meeting"].read("segment", 0)


def give_up(state: Rank) -> str:
    """For a reason of its own, which counts whether or not it can still be told."""
    state.kept["meeting"].fail("seen", ZeroDivisionError("no remainder"))
    return "told"


def test_missing_rank_is_whose_fault_it_is(two: Ranks) -> None:
    two.start(0, connect_and_count, two.rendezvous(connect_timeout_s=1.0))
    num_left, failure = two.outcome(0, FAILS_S)
    assert num_left == 0, "a failed connection leaves descriptors"
    assert failure.is_consequence
    assert failure.waited_for == 1


@pytest.mark.parametrize("task", [say, listen])
def test_rank_0_that_dies_is_whose_fault_it_is(task: Task, two: Ranks) -> None:
    """Its store dies with it: the others hear of it as they speak or as they listen."""
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
