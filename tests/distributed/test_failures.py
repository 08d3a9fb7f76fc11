"""When a rank dies, freezes or leaves, the waits of the other ranks end with an error."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distributed.ranks import Rank, Ranks
from tpengine.errors import CollectiveError, RendezvousError
from tpengine.ops.recording import Recording

DEADLINE_S = 1.5
"""Timeout of a wait that must reach it."""
LONG_S = 600.0
"""Likewise of one that must end by something else: more than a test may take."""


def recorded_sum(state: Rank, kind: str) -> Callable[[], None]:
    """Returns a function that runs a recorded sum of 256 bytes."""
    recording = Recording(8)
    with recording.noting():
        state[kind].all_reduce(torch.ones(8, 16))
    return lambda: recording.run(4)


def work_forever(state: Rank, kind: str, is_recorded: bool) -> None:
    run = recorded_sum(state, kind) if is_recorded else lambda: reduce_once(state, kind)
    while True:
        run()


def reduce_once(state: Rank, kind: str) -> None:
    state[kind].all_reduce(torch.ones(64))


def give_up(state: Rank, kind: str) -> None:
    state[kind].abandon()


def leave_while_waiting(state: Rank, kind: str) -> str:
    """Closes the group from another thread, like a shutdown in the middle of a step, once this one
    has gone to sleep in a recorded sum: it neither spins nor holds the interpreter."""
    run = recorded_sum(state, kind)
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def close() -> None:
        num_asleep = 0
        while num_asleep < 5:
            time.sleep(0.02)
            is_asleep = stat.read_text().rpartition(")")[2].split()[0] == "S"
            num_asleep = num_asleep + 1 if is_asleep else 0
        state[kind].close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(CollectiveError) as waiting:
        run()
    closing.join()
    for use in (run, lambda: state[kind].broadcast(torch.ones(64))):
        with pytest.raises(CollectiveError, match="256 bytes at rank 0: this rank has left the"):
            use()
    state[kind].close()
    return str(waiting.value)


def lose(
    ranks: Ranks, kind: str, victim: int, number: int, deadline_s: float, is_recorded: bool = True
) -> list[CollectiveError]:
    """Sends a signal to a rank while all ranks work; returns the other ranks' errors."""
    ranks.connect(kind, timeout_s=deadline_s)
    for rank in range(ranks.size):
        ranks.start(rank, work_forever, kind, is_recorded)
    time.sleep(0.3)
    ranks.signal(victim, number)
    errors = [ranks.outcome(rank) for rank in range(ranks.size) if rank != victim]
    ranks.kill(victim)
    for error in errors:
        assert isinstance(error, CollectiveError), error
        assert error.failed_rank == victim
    return errors


@pytest.mark.parametrize(("victim", "is_recorded"), [(0, True), (2, False)])
def test_killed_rank(victim: int, is_recorded: bool, three: Ranks) -> None:
    for error in lose(three, "shared memory", victim, signal.SIGKILL, LONG_S, is_recorded):
        assert f"rank {victim}" in str(error)
        assert "all_reduce of 256 bytes" in str(error)


@pytest.mark.parametrize(("victim", "is_recorded"), [(0, False), (2, True)])
def test_frozen_rank(victim: int, is_recorded: bool, three: Ranks) -> None:
    errors = lose(three, "shared memory", victim, signal.SIGSTOP, DEADLINE_S, is_recorded)
    assert any(f"rank {victim} did not arrive within 1.5 s" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("number", "deadline_s"), [(signal.SIGKILL, LONG_S), (signal.SIGSTOP, DEADLINE_S)]
)
def test_gloo(number: int, deadline_s: float, two: Ranks) -> None:
    [error] = lose(two, "gloo", 1, number, deadline_s, is_recorded=False)
    assert "all_reduce of 256 bytes at rank 0: rank 1" in str(error)


def test_rank_that_gives_up(two: Ranks) -> None:
    two.connect(timeout_s=LONG_S)
    two.start(0, reduce_once, "shared memory")
    two.start(1, give_up, "shared memory")
    error = two.outcome(0)
    assert isinstance(error, CollectiveError)
    assert "rank 1 failed, or left the group" in str(error)
    assert error.failed_rank == 1
    # later operations fail as well
    assert isinstance(two.outcomes(reduce_once, "shared memory")[0], CollectiveError)


def test_shutdown_while_waiting(two: Ranks) -> None:
    two.connect(timeout_s=LONG_S)
    two.start(0, leave_while_waiting, "shared memory")
    assert "rank 0 failed, or left the group" in two.outcome(0)
    # Rank 0's contribution before it left still counts; rank 1 does not wait for further ones.
    two.start(1, reduce_once, "shared memory")
    assert two.outcome(1) is None
    two.start(1, reduce_once, "shared memory")
    assert isinstance(two.outcome(1), CollectiveError)


@pytest.mark.parametrize("kind", [CollectiveError, RendezvousError])
def test_error_survives_pickling(kind: type[CollectiveError | RendezvousError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 3 is gone", 3)))
    assert (type(error), str(error), error.failed_rank) == (kind, "rank 3 is gone", 3)
