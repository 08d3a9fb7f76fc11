"""Two ranks of one thread each against one process with two threads, on the same work.

One engine lives in this process, the other's ranks are Ray actors of this machine; they serve the
same requests in turn, so that whatever else the machine does meets both, and what counts is the
ratio of each pair. Also: what the start of the ranks takes, by phase, from a checkpoint on disk.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common import (
    add_numbers,
    add_shape_argument,
    alternate,
    cpu_s,
    local_ray,
    write_weights,
)
from tpengine.bench.harness import GREEDY, median_of, mixed_requests, report_head, shape_folder
from tpengine.bench.throughput import run_once
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.local_executor import create_executor

_WARM_UP_REQUESTS = 4
_WARM_UP_OUTPUT = 4
_CACHE_GIB = 0.5
"""Of KV cache, of all ranks together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    add_shape_argument(parser)
    add_numbers(
        parser,
        ranks=(2, "processes, a thread each"),
        num_requests=(32, "of a run"),
        pairs=(5, "runs of each"),
        starts=(3, "starts to time"),
    )
    parser.add_argument(
        "--dtype", default="auto", help="of weights and activations (default: auto)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    if min(args.ranks - 1, args.num_requests, args.pairs, args.starts) < 1:
        raise SystemExit("--ranks must be at least 2, the other numbers at least 1")
    with local_ray(args.ranks), shape_folder(args.shape) as folder:
        one = EngineArgs(
            folder,
            device="cpu",
            dtype=args.dtype,
            cpu_kv_cache_space=_CACHE_GIB,
            swap_space=0.0,
            disable_log_stats=True,
        )
        write_weights(one, Path(folder))
        several = replace(
            one,
            tensor_parallel_size=args.ranks,
            executor="ray",
            cpu_kv_cache_space=_CACHE_GIB / args.ranks,
        )
        print(report_head(one), flush=True)
        _report_starts(several, args.starts)
        with (
            LLMEngine.from_engine_args(one) as first,
            LLMEngine.from_engine_args(several) as second,
        ):
            _report_throughput(args, first, second)
    return 0


def _report_starts(args: EngineArgs, count: int) -> None:
    """Starts and ends the engine; prints the phases of the median start."""
    starts = []
    for _ in range(count):
        begin = time.perf_counter()
        config, executor = create_executor(args)
        assert isinstance(executor, GroupExecutor)
        with LLMEngine(config, executor, log_stats=False):
            taken = time.perf_counter() - begin
            phases = dict(executor.start_times_s)
            cpu = max(cpu_s(place.pid) for place in executor.places)
        starts.append((taken, phases, cpu))
    starts.sort(key=lambda start: start[0])
    taken, phases, cpu = starts[count // 2]
    rest = taken - sum(phases.values())
    times = ", ".join(f"{name} {spent:.2f}" for name, spent in phases.items())
    all_times = median_of([start[0] for start in starts], " s")
    print(f"start of {args.tensor_parallel_size} ranks   {all_times}")
    print(f"  by phase          {times}, driver {rest:.2f}")
    print(f"  CPU time          {cpu:.2f} s of the busiest rank", flush=True)


def _report_throughput(args: argparse.Namespace, first: LLMEngine, second: LLMEngine) -> None:
    model = first.get_model_config()
    workloads = [
        mixed_requests(args.num_requests, model.vocab_size, 0, model.max_model_len, i)
        for i in range(args.pairs)
    ]
    warm_up = [(prompt, _WARM_UP_OUTPUT) for prompt, _ in workloads[0][:_WARM_UP_REQUESTS]]
    for engine in (first, second):
        run_once(engine, warm_up, GREEDY)
    results = alternate(
        (first, second), args.pairs, lambda engine, i: run_once(engine, workloads[i], GREEDY)
    )
    pairs = list(zip(results[first], results[second], strict=True))
    for name, side in (("one process", 0), (f"{args.ranks} ranks", 1)):
        rates = [pair[side].output_rate for pair in pairs]
        print(f"{name:<20}{median_of(rates, ' output tokens/s', 0)}")
    ratios = [theirs.output_rate / ours.output_rate for ours, theirs in pairs]
    print(f"ratio               {median_of(ratios, ' x')}")
    print(f"machine's load      {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
