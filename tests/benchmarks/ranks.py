"""Two ranks of one thread each against one process with two threads, on the same work.

One engine lives in this process, the other's ranks are Ray actors of this machine; they serve the
same requests in turn, so that whatever else the machine does meets both, and what counts is the
ratio of each pair. Also: what the start of the ranks takes, by phase, from a checkpoint on disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from tpengine import envs
from tpengine.bench.harness import SHAPES, Workload, mixed_requests, report_head, shape_folder
from tpengine.bench.recovery import write_weights
from tpengine.bench.throughput import RunResult, run_once
from tpengine.bench.transport import cpu_s
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.executor.launch.ray_executor import RayExecutor
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_WARM_UP_REQUESTS = 4
_WARM_UP_OUTPUT = 4
_CACHE_GIB = 0.5
"""Of KV cache, of all ranks together."""
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-124m",
        help="random weights of this shape (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes, a thread each (default: 2)"
    )
    parser.add_argument("--num-requests", type=int, default=32, help="of a run (default: 32)")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--starts", type=int, default=3, help="starts to time (default: 3)")
    parser.add_argument(
        "--dtype", default="auto", help="of weights and activations (default: auto)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    import ray

    if min(args.ranks - 1, args.num_requests, args.pairs, args.starts) < 1:
        raise SystemExit("--ranks must be at least 2, the other numbers at least 1")
    envs.prepare_local_ray()
    ray.init(address="local", num_cpus=args.ranks, include_dashboard=False, log_to_driver=False)
    try:
        with shape_folder(args.shape) as folder:
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
    finally:
        ray.shutdown()
    return 0


def _report_starts(args: EngineArgs, count: int) -> None:
    """Starts and ends the engine; prints the phases of the median start."""
    starts = []
    for _ in range(count):
        begin = time.perf_counter()
        with LLMEngine.from_engine_args(args) as engine:
            taken = time.perf_counter() - begin
            executor = engine._executor
            assert isinstance(executor, RayExecutor)
            phases = dict(executor.start_times_s)
            cpu = max(cpu_s(place.pid) for place in executor.places)
        starts.append((taken, phases, cpu))
    starts.sort(key=lambda start: start[0])
    taken, phases, cpu = starts[count // 2]
    rest = taken - sum(phases.values())
    times = ", ".join(f"{name} {spent:.2f}" for name, spent in phases.items())
    all_times = ", ".join(f"{start[0]:.2f}" for start in starts)
    print(f"start of {args.tensor_parallel_size} ranks   {taken:.2f} s (all: {all_times})")
    print(f"  by phase          {times}, driver {rest:.2f}")
    print(f"  CPU time          {cpu:.2f} s of the busiest rank", flush=True)


def _report_throughput(args: argparse.Namespace, first: LLMEngine, second: LLMEngine) -> None:
    model = first.get_model_config()
    workloads: list[Workload] = [
        mixed_requests(args.num_requests, model.vocab_size, 0, model.max_model_len, i)
        for i in range(args.pairs)
    ]
    warm_up = [(prompt, _WARM_UP_OUTPUT) for prompt, _ in workloads[0][:_WARM_UP_REQUESTS]]
    for engine in (first, second):
        run_once(engine, warm_up, _PARAMS)
    pairs: list[tuple[RunResult, RunResult]] = []
    for i, workload in enumerate(tqdm(workloads, desc="pairs", unit="pair")):
        turns = {
            engine: run_once(engine, workload, _PARAMS)
            for engine in ((first, second) if i % 2 == 0 else (second, first))
        }
        pairs.append((turns[first], turns[second]))
    for name, results in (
        ("one process", [pair[0] for pair in pairs]),
        (f"{args.ranks} ranks", [pair[1] for pair in pairs]),
    ):
        rates = [result.output_rate for result in results]
        listed = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"{name:<20}{statistics.median(rates):.0f} output tokens/s   (runs: {listed})")
    ratios = [theirs.output_rate / ours.output_rate for ours, theirs in pairs]
    listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"ratio               {statistics.median(ratios):.2f} x   (pairs: {listed})")
    print(f"machine's load      {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
