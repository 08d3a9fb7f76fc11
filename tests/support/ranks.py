"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tpengine.distributed.parallel_state import ParallelState

TIMEOUT_S = 60.0
T = TypeVar("T")


class ThreadCollectives:
    """Sums and concatenations of tensors that threads hand over at a barrier.

    Attributes:
        num_calls: collectives so far, of rank 0.
    """

    def __init__(self, tp_size: int) -> None:
        self._barrier = threading.Barrier(tp_size, timeout=TIMEOUT_S)
        self._given: list[torch.Tensor] = [torch.empty(0)] * tp_size
        self.num_calls = 0

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, in rank order."""
        self._given[rank] = x
        self._barrier.wait()
        everyone = list(self._given)
        self._barrier.wait()
        self.num_calls += rank == 0
        return everyone

    def abort(self) -> None:
        """Lets the others fail at once rather than at the timeout."""
        self._barrier.abort()


class RankCollectives:
    """One rank's face of `ThreadCollectives`."""

    can_be_recorded = False

    def __init__(self, shared: ThreadCollectives, rank: int) -> None:
        self._shared = shared
        self._rank = rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._shared.exchange(self._rank, x)).sum(dim=0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._shared.exchange(self._rank, x), dim=-1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self.all_gather(x)
        return gathered if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.exchange(self._rank, x)[0].clone()

    def abandon(self) -> None:
        self._shared.abort()

    def close(self) -> None:
        pass


def run_ranks(tp_size: int, work: Callable[[ParallelState], T]) -> tuple[list[T], int]:
    """Runs `work` on every rank at once; returns the answers in rank order, and how many
    collectives there were."""
    shared = ThreadCollectives(tp_size)

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ParallelState(rank, tp_size, RankCollectives(shared, rank)))
        except BaseException:
            shared.abort()
            raise

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(tp_size)]
        errors = [future.exception(TIMEOUT_S) for future in futures]
        for error in errors:  # the first cause, not who waited for it in vain
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures], shared.num_calls
