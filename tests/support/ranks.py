"""The ranks of a group, or of a pipeline, as threads of one process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState, Stage
from tpengine.executor.executor import Executor
from tpengine.messages import StepInput, StepOutput
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


class ThreadLink:
    """A link between stages whose ranks are threads: a queue of copies."""

    name = "queue"

    def __init__(self, num_readers: int = 1) -> None:
        self._queues: list[queue.Queue[torch.Tensor | None]] = []
        self._queues += [queue.Queue() for _ in range(num_readers)]

    def of_reader(self, number: int) -> ThreadLink:
        """The end of one of several ranks that read the same."""
        end = ThreadLink(0)
        end._queues = [self._queues[number]]
        return end

    def send(self, x: torch.Tensor) -> None:
        for entries in self._queues:
            entries.put(x.clone())

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        x = self._queues[0].get(timeout=TIMEOUT_S)
        if x is None:
            raise threading.BrokenBarrierError
        assert x.shape == out.shape
        return out.copy_(x)

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        for entries in self._queues:
            entries.put(None)


class ThreadedExecutor(Executor):
    """One worker per rank, each in its own thread: an engine's ranks without a cluster."""

    def __init__(self, config: EngineConfig, tp_size: int) -> None:
        super().__init__()
        count = config.parallel.pipeline_parallel_size
        self._first_sampling = (count - 1) * tp_size
        self._pools: list[ThreadPoolExecutor] = []
        self._workers: list[Worker] = []
        self._groups: list[ThreadCollectives] = []
        self._steps: deque[list[Future[list[StepOutput]]]] = deque()
        before: list[ThreadLink] | list[None] = [None] * tp_size
        ids = ThreadLink(self._first_sampling)
        for index in range(count):
            is_last = index == count - 1
            after = [None if is_last else ThreadLink() for _ in range(tp_size)]
            group = ThreadCollectives(tp_size)
            for rank, source, target in zip(range(tp_size), before, after, strict=True):
                sampled = ids if is_last else ids.of_reader(index * tp_size + rank)
                stage = Stage(index, count, None, source, target, (sampled,))
                if count == 1 or (is_last and rank):
                    stage = replace(stage, sampled=())
                place = ParallelState(rank, tp_size, RankCollectives(group, rank), stage=stage)
                self._workers.append(Worker(config, place))
                self._groups.append(group)
                self._pools.append(ThreadPoolExecutor(1))
            before = after

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        def call(rank: int) -> Any:
            work = partial(getattr(self._workers[rank], method), *args, **kwargs)
            return self._groups[rank].call(work)

        return [pool.submit(call, rank) for rank, pool in enumerate(self._pools)]

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return results_of(self._submit(method, *args, **kwargs))

    def send_step(self, step: StepInput) -> None:
        """Begins the step at once, as ranks in processes do."""
        self._steps.append(self._submit("execute_model", step))

    def take_answer(self) -> StepOutput:
        while not self._answers:
            steps = self._steps.popleft() if self._steps else self._submit("finish_steps")
            all_answers = results_of(steps)
            answers = all_answers[self._first_sampling :]
            sampled = [[output.token_ids for output in outputs] for outputs in answers]
            assert all(ids == sampled[0] for ids in sampled), "ranks sampled different tokens"
            for output in answers[0] if self._first_sampling else ():
                output.load_results |= all_answers[0][0].load_results
            self._answers += answers[0]
        return self._answers.popleft()

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()
        for pool in self._pools:
            pool.shutdown()
