"""All-reduce of CPU ranks on this host: over shared memory, and over gloo.

Two figures of each: one all-reduce after another, and a step of a model that computes between
them, where a rank that waits too eagerly takes the core from one that computes. A process per
rank; the ways are measured in turn, several rounds of each, and the median round counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import add_numbers
from tpengine.bench.harness import report_head
from tpengine.distributed.collectives import GlooCollectives, connect_ranks
from tpengine.distributed.rendezvous import Meeting, RendezvousStore
from tpengine.messages import Rendezvous

_ADDRESS = "127.0.0.1"
_TIMEOUT_S = 60.0
_WAYS = ("shared memory", "gloo, in rank order", "gloo's own all_reduce", "no exchange")
Reduce = Callable[[torch.Tensor], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    add_numbers(
        parser,
        ranks=(2, "processes, a thread each"),
        bytes=(16384, "of float32 to add up"),
        runs=(200, "all-reduces in a round"),
        steps=(5, "of a model in a round"),
        exchanges=(48, "all-reduces in a step"),
        compute_us=(100.0, "microseconds of work before each"),
        rounds=(5, "median of these"),
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the table."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(args.ranks)]
    processes = [
        context.Process(target=_measure, args=(rank, args, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in processes:
            process.start()
        port = _receive(pipes[0][0])
        for ours, _ in pipes[1:]:
            ours.send(port)
        results: dict[str, dict[str, Any]] = _receive(pipes[0][0], args.rounds * _TIMEOUT_S)
        for process in processes:
            process.join(_TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    torch.set_num_threads(1)
    print(
        f"collectives: {args.ranks} ranks of one thread, float32, {args.bytes} bytes; "
        f"median of {args.rounds} rounds of {args.runs} all-reduces and of {args.steps} steps of "
        f"{args.exchanges} x ({args.compute_us:g} us compute + all-reduce)"
    )
    print(report_head(None))
    for way, found in results.items():
        print(
            f"{way:24} {statistics.median(found['once']):10.1f} us an all-reduce "
            f"(99 %: {statistics.median(found['slow']):8.1f})  "
            f"{statistics.median(found['step']):8.2f} ms a step (best {min(found['step']):.2f})"
        )
    return 0


def _receive(connection: Connection, timeout_s: float = _TIMEOUT_S) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError("a rank gave no answer")
    return connection.recv()


def _measure(rank: int, args: argparse.Namespace, connection: Connection) -> None:
    torch.set_num_threads(1)
    store = RendezvousStore(_ADDRESS) if rank == 0 else None
    if store is not None:
        connection.send(store.port)
    port = store.port if store is not None else _receive(connection)
    rendezvous = Rendezvous("bench", 0, [_ADDRESS] * args.ranks, port, _TIMEOUT_S, _TIMEOUT_S)
    parallel, how = connect_ranks(rank, rendezvous, torch.device("cpu"), store)
    assert how.endswith("shared memory"), f"{how}; this benchmark needs the native library"
    gloo = GlooCollectives(Meeting(rank, rendezvous, store), _TIMEOUT_S)
    options = dist.AllreduceOptions()
    reduces: list[Reduce] = [
        parallel.all_reduce,
        gloo.all_reduce,
        lambda x: gloo.group.allreduce([x], options).wait(),
        lambda x: None,
    ]
    results: dict[str, dict[str, list[float]]] = {
        way: {"once": [], "slow": [], "step": []} for way in _WAYS
    }
    x = torch.zeros(args.bytes // 4)
    for _ in range(args.rounds):
        for way, reduce in zip(_WAYS, reduces, strict=True):
            parallel.all_reduce(x)  # begin together
            times = sorted(_time(lambda reduce=reduce: reduce(x)) for _ in range(args.runs))
            steps = [_time(lambda reduce=reduce: _step(args, reduce, x)) for _ in range(args.steps)]
            results[way]["once"].append(1e6 * statistics.median(times))
            results[way]["slow"].append(1e6 * times[int(0.99 * len(times))])
            results[way]["step"].append(1e3 * statistics.median(steps))
    if rank == 0:
        connection.send(results)
    parallel.all_reduce(x)  # no rank leaves before all are done
    parallel.close()
    gloo.close()


def _step(args: argparse.Namespace, reduce: Reduce, x: torch.Tensor) -> None:
    for _ in range(args.exchanges):
        end = time.perf_counter() + 1e-6 * args.compute_us
        while time.perf_counter() < end:
            pass
        reduce(x)


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
