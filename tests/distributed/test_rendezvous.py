"""How ranks connect, and the errors when they cannot: they name the failed rank, and no descriptor
is left open."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace

import pytest

from distributed import ranks
from distributed.ranks import Rank, Ranks, connect_by_any_means
from tpengine.distributed.rendezvous import Meeting, interface_of, make_store
from tpengine.errors import RendezvousError
from tpengine.messages import Rendezvous

FAILS_S = 60.0


def test_store_listens_on_its_address_only() -> None:
    store = make_store("127.0.0.1")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=2)
    socket.create_connection(("127.0.0.1", store.port), timeout=2).close()


def test_address_of_another_machine() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        make_store("192.0.2.1")


def test_interface() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_store_that_is_not_there(two: Ranks) -> None:
    two.start(1, connect_by_any_means, replace(two.rendezvous(connect_timeout_s=1.0), port=1))
    error = two.outcome(1)
    assert isinstance(error, RendezvousError)
    assert "cannot reach rank 0 at 127.0.0.1:1" in str(error)


@pytest.mark.parametrize(
    "lack",
    [(ranks.hide_shared_memory, 1), (ranks.refuse_memory, 0), (ranks.refuse_to_map, 1)],
)
def test_gloo_where_memory_is_not_shared(two: Ranks, lack: tuple[ranks.Task, int]) -> None:
    """Equal addresses do not prove that it is; or there is too little to allocate the segment, or
    for one rank to map it. No rank is left waiting."""
    two.run(*lack)
    assert two.run(connect_by_any_means, two.rendezvous()) == [
        f"rank {rank} of 2 at 127.0.0.1 (interface lo) by gloo" for rank in (0, 1)
    ]


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
        state.kept["meeting"].publish("attached", b"1")
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
def test_rank_0_that_dies_is_the_failed_rank(task: ranks.Task, two: Ranks) -> None:
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
