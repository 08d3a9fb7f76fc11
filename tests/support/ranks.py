"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.executor.executor import Executor
from tpengine.worker.worker import Worker

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

    def exchange(
        self, rank: int, x: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """What `join` makes of the tensors of all ranks, in rank order."""
        self._given[rank] = x
        self._barrier.wait()
        joined = join(self._given)
        self._barrier.wait()  # all have read before any rank overwrites
        self.num_calls += rank == 0
        return joined

    def abort(self) -> None:
        """Lets the others fail at once rather than at the timeout."""
        self._barrier.abort()

    def call(self, work: Callable[[], T]) -> T:
        """Does one rank's work; the others fail with it."""
        try:
            return work()
        except BaseException:
            self.abort()
            raise


class RankCollectives:
    """One rank's face of `ThreadCollectives`; all ranks get the same bits."""

    can_be_recorded = True

    def __init__(self, shared: ThreadCollectives, rank: int) -> None:
        self._shared = shared
        self._rank = rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.exchange(self._rank, x, lambda parts: torch.stack(parts).sum(dim=0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.exchange(self._rank, x, lambda parts: torch.cat(parts, dim=-1))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self.all_gather(x)
        return gathered if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.exchange(self._rank, x, lambda parts: parts[0].clone())

    def abandon(self) -> None:
        self._shared.abort()

    def close(self) -> None:
        pass


class OwnPart:
    """In the place of the other ranks, in a test that reads only this rank's contribution."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


def results_of(futures: list[Future[T]]) -> list[T]:
    """The ranks' answers; raises the first cause, not the error of a rank that waited for it."""
    errors = [future.exception(TIMEOUT_S) for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def run_ranks(tp_size: int, work: Callable[[ParallelState], T]) -> tuple[list[T], int]:
    """Runs `work` on every rank at once; returns the answers in rank order, and how many
    collectives there were."""
    shared = ThreadCollectives(tp_size)

    def one(rank: int) -> T:
        with torch.inference_mode():
            return work(ParallelState(rank, tp_size, RankCollectives(shared, rank)))

    with ThreadPoolExecutor(tp_size) as pool:
        futures = [pool.submit(shared.call, lambda r=rank: one(r)) for rank in range(tp_size)]
        return results_of(futures), shared.num_calls


class ThreadedExecutor(Executor):
    """One worker per rank, each in its own thread: an engine's ranks without a cluster."""

    def __init__(self, config: EngineConfig, tp_size: int) -> None:
        super().__init__()
        self._shared = ThreadCollectives(tp_size)
        self._pool = ThreadPoolExecutor(tp_size)
        self._workers = [
            Worker(config, ParallelState(rank, tp_size, RankCollectives(self._shared, rank)))
            for rank in range(tp_size)
        ]

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        futures = [
            self._pool.submit(self._shared.call, lambda w=w: getattr(w, method)(*args, **kwargs))
            for w in self._workers
        ]
        answers = results_of(futures)
        if method == "execute_model":
            sampled = [[output.token_ids for output in outputs] for outputs in answers]
            assert all(ids == sampled[0] for ids in sampled), "ranks sampled different tokens"
        return answers

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()
        self._pool.shutdown()
