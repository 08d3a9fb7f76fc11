"""When a rank dies, freezes or leaves, the waits of the other ranks end with an error."""

from __future__ import annotations

import pickle
import signal
import threading
import time

import pytest
import torch

from distributed.ranks import Rank, Ranks
from tpengine.errors import CollectiveError, RendezvousError

DEADLINE_S = 1.5
"""Timeout of a wait that must reach it; waits that must end long before it have `LONG_S`."""
LONG_S, AT_ONCE_S = 60.0, 30.0


def work_forever(state: Rank, kind: str) -> None:
    while True:
        state[kind].all_reduce(torch.ones(64))


def reduce_timed(state: Rank, kind: str, num_sums: int = 1) -> tuple[float, float, int]:
    """Seconds of the sums, CPU seconds of this process, and the progress of another thread."""
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        for _ in range(num_sums):
            state[kind].all_reduce(torch.ones(64))
    finally:
        waited, cpu = time.perf_counter() - start, time.process_time() - cpu
        done.set()
        thread.join()
    return waited, cpu, ticks


def reduce_later(state: Rank, kind: str, delay_s: float) -> None:
    state[kind].all_reduce(torch.ones(64))
    time.sleep(delay_s)
    state[kind].all_reduce(torch.ones(64))


def give_up(state: Rank, kind: str) -> None:
    time.sleep(0.2)
    state[kind].abandon()


def leave_while_waiting(state: Rank, kind: str) -> str:
    """Closes the group from another thread, like a shutdown in the middle of a step."""
    timer = threading.Timer(0.3, state[kind].close)
    timer.start()
    with pytest.raises(CollectiveError) as waiting:
        state[kind].all_reduce(torch.ones(64))
    timer.join()
    with pytest.raises(CollectiveError, match="this rank has left the group"):
        state[kind].broadcast(torch.ones(64))
    state[kind].close()
    return str(waiting.value)


def lose(
    ranks: Ranks, kind: str, victim: int, number: int, deadline_s: float
) -> list[tuple[CollectiveError, float]]:
    """Sends a signal to a rank while all ranks work.

    Returns the other ranks' errors, and the seconds until they came."""
    ranks.connect(kind, timeout_s=deadline_s)
    for rank in range(ranks.size):
        ranks.start(rank, work_forever, kind)
    time.sleep(0.3)
    start = time.perf_counter()
    ranks.signal(victim, number)
    found = []
    for rank in range(ranks.size):
        if rank != victim:
            error = ranks.outcome(rank, 2 * LONG_S)
            assert isinstance(error, CollectiveError), error
            found.append((error, time.perf_counter() - start))
    ranks.kill(victim)
    return found


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank(victim: int, three: Ranks) -> None:
    for error, seconds in lose(three, "shared memory", victim, signal.SIGKILL, LONG_S):
        assert seconds < AT_ONCE_S
        assert error.failed_rank == victim
        assert f"rank {victim}" in str(error)
        assert "all_reduce of 256 bytes" in str(error)


@pytest.mark.parametrize("victim", [0, 2])
def test_frozen_rank(victim: int, three: Ranks) -> None:
    errors = lose(three, "shared memory", victim, signal.SIGSTOP, DEADLINE_S)
    for error, seconds in errors:
        assert DEADLINE_S * 0.9 < seconds < DEADLINE_S + AT_ONCE_S
        assert error.failed_rank == victim
    assert any(f"rank {victim} did not arrive within 1.5 s" in str(error) for error, _ in errors)


@pytest.mark.parametrize(
    ("number", "deadline_s"), [(signal.SIGKILL, LONG_S), (signal.SIGSTOP, DEADLINE_S)]
)
def test_gloo(number: int, deadline_s: float, two: Ranks) -> None:
    [(error, seconds)] = lose(two, "gloo", 1, number, deadline_s)
    assert seconds < DEADLINE_S + AT_ONCE_S
    assert error.failed_rank == 1
    assert "all_reduce of 256 bytes at rank 0: rank 1" in str(error)


def test_rank_that_gives_up(two: Ranks) -> None:
    two.connect(timeout_s=LONG_S)
    two.start(0, reduce_timed, "shared memory")
    two.start(1, give_up, "shared memory")
    error = two.outcome(0, AT_ONCE_S)
    assert isinstance(error, CollectiveError)
    assert "rank 1 failed, or left the group" in str(error)
    assert error.failed_rank == 1
    # later operations fail as well
    assert isinstance(two.outcomes(reduce_timed, "shared memory")[0], CollectiveError)


def test_shutdown_while_waiting(two: Ranks) -> None:
    two.connect(timeout_s=LONG_S)
    two.start(0, leave_while_waiting, "shared memory")
    assert "rank 0 failed, or left the group" in two.outcome(0, AT_ONCE_S)
    # Rank 0's contribution before it left still counts; rank 1 does not wait for further ones.
    start = time.perf_counter()
    two.start(1, reduce_timed, "shared memory")
    assert not isinstance(two.outcome(1, AT_ONCE_S), Exception)
    two.start(1, reduce_timed, "shared memory")
    assert isinstance(two.outcome(1, AT_ONCE_S), CollectiveError)
    assert time.perf_counter() - start < AT_ONCE_S


@pytest.mark.parametrize("kind", [CollectiveError, RendezvousError])
def test_error_survives_pickling(kind: type[CollectiveError | RendezvousError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 3 is gone", 3)))
    assert (type(error), str(error), error.failed_rank) == (kind, "rank 3 is gone", 3)


def test_waiting_sleeps_and_frees_the_interpreter(two: Ranks) -> None:
    two.connect()
    two.start(0, reduce_timed, "shared memory", 2)  # rank 1 counts its delay from the first sum
    two.start(1, reduce_later, "shared memory", 1.0)
    waited, cpu, ticks = two.outcome(0)
    assert waited > 0.8
    assert cpu < 0.1 * waited
    assert ticks > 10
    assert two.outcome(1) is None
