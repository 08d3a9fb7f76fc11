"""A rank that cannot connect names the failed rank, and leaves no open descriptors."""

from __future__ import annotations

import os
import signal
import time

import pytest

from distributed.ranks import Rank, Ranks, Task, connect_by_any_means
from tpengine.distributed.rendezvous import Meeting
from tpengine.errors import RendezvousError
from tpengine.messages import Rendezvous

FAILS_S = 60.0


def connect_and_count(state: Rank, rendezvous: Rendezvous) -> tuple[int, RendezvousError]:
    """Returns the number of descriptors that a failed connection leaves open, and its error."""
    before = len(os.listdir("/proc/self/fd"))
    try:
        connect_by_any_means(state, rendezvous)
    except RendezvousError as error:
        failure = error
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


def test_missing_rank_is_the_failed_rank(two: Ranks) -> None:
    two.start(0, connect_and_count, two.rendezvous(connect_timeout_s=1.0))
    num_left, error = two.outcome(0, FAILS_S)
    assert num_left == 0, "a failed connection leaves descriptors"
    assert error.failed_rank == 1
    assert "waited for rank 1 (127.0.0.1), which did not arrive within 1 s" in str(error)


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
