"""A group of ranks in one process, one thread each: sharding without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.executor.executor import Executor
from tpengine.worker.worker import Worker

_TIMEOUT_S = 60.0


class _Meeting:
    """Holds the ranks' tensors during an exchange."""

    def __init__(self, tp_size: int) -> None:
        self.barrier = threading.Barrier(tp_size, timeout=_TIMEOUT_S)
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * tp_size

    def exchange(
        self, rank: int, x: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.tensors[rank] = x
        self.barrier.wait()
        joined = join(self.tensors)
        self.barrier.wait()  # all have read before any rank overwrites
        return joined


class ThreadCollectives:
    """Collectives of one rank; sums are in rank order, so that all ranks get the same bits."""

    can_be_recorded = True

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self._rank, x, lambda parts: torch.stack(parts).sum(dim=0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self._rank, x, lambda parts: torch.cat(parts, dim=-1))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = self.all_gather(x)
        return gathered if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self._rank, x, lambda parts: parts[0].clone())

    def abandon(self) -> None:
        self._meeting.barrier.abort()

    def close(self) -> None:
        pass


class ThreadedExecutor(Executor):
    """One worker per rank, each in its own thread.

    Attributes:
        workers: by rank.
    """

    def __init__(self, config: EngineConfig, tp_size: int) -> None:
        self._meeting = _Meeting(tp_size)
        self._pool = ThreadPoolExecutor(tp_size)
        self.workers = [
            Worker(config, ParallelState(rank, tp_size, ThreadCollectives(rank, self._meeting)))
            for rank in range(tp_size)
        ]

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        def call(worker: Worker) -> Any:
            try:
                return getattr(worker, method)(*args, **kwargs)
            except BaseException:
                self._meeting.barrier.abort()  # otherwise the others wait for this rank
                raise

        futures = [self._pool.submit(call, worker) for worker in self.workers]
        errors = [error for future in futures if (error := future.exception(_TIMEOUT_S))]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        answers = [future.result(_TIMEOUT_S) for future in futures]
        if method == "execute_model":
            sampled = [answer.token_ids for answer in answers]
            assert all(ids == sampled[0] for ids in sampled), "ranks sampled different tokens"
        return answers

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self._pool.shutdown()
