"""Time of the driver's bookkeeping: schedule and update of decode steps, with a queue behind."""

from __future__ import annotations

import argparse
import statistics
import time

from scheduling.loop import make_request

from benchmarks.common import add_numbers
from tpengine.bench.harness import report_head
from tpengine.config import SchedulerConfig
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.step import StepDecisions

PROMPT_TOKENS = 64
BLOCK_SIZE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark can be told."""
    add_numbers(
        parser,
        running=(256, "sequences that run"),
        waiting=(10_000, "requests that wait"),
        steps=(500, "decode steps to measure"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints medians and 99th percentiles in milliseconds."""
    scheduler, params = _build(args), SamplingParams(max_tokens=None)
    start = time.perf_counter()
    for index in range(args.running + args.waiting):
        # Lengths differ, so that not all sequences want their next block in the same step; so does
        # the first token, so that the prefix cache finds none of them again.
        prompt = [index, *range(1, PROMPT_TOKENS - index % BLOCK_SIZE)]
        scheduler.add_request(make_request(index, prompt, params))
    add_s = time.perf_counter() - start
    while scheduler.num_running < args.running:
        _step(scheduler)
    _step(scheduler)  # the first decode of those that were admitted last
    steps_ms = sorted(_step(scheduler) for _ in range(args.steps))
    start = time.perf_counter()
    for index in range(args.running, args.running + args.waiting):
        scheduler.abort_request(f"r{index}")
    abort_s = time.perf_counter() - start

    print(f"scheduler: {args.running} running, {args.waiting} waiting, {args.steps} decode steps")
    print(report_head(None))
    p99_ms = steps_ms[min(len(steps_ms) - 1, int(0.99 * len(steps_ms)))]
    print(
        f"schedule + append + update: median {statistics.median(steps_ms):.3f} ms, "
        f"p99 {p99_ms:.3f} ms a step"
    )
    if args.waiting:
        print(f"adding all requests {add_s:.3f} s, aborting the waiting ones {abort_s:.3f} s")
    return 0


def _build(args: argparse.Namespace) -> Scheduler:
    num_tokens = PROMPT_TOKENS + args.steps + args.running + 2
    blocks_each = -(-num_tokens // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_batched_tokens=max(2048, args.running),
        max_num_seqs=args.running,
        max_model_len=num_tokens,
        enable_chunked_prefill=True,
        policy="fcfs",
        preemption_mode="swap",
    )
    # Twice what the running ones need, so that neither watermark nor preemption joins in.
    num_blocks = 2 * blocks_each * args.running
    return Scheduler(config, BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True))


def _step(scheduler: Scheduler) -> float:
    """One step without a model; returns its milliseconds."""
    start = time.perf_counter()
    output = scheduler.schedule()
    scheduler.update(StepDecisions(tokens=[(sequence, 7) for sequence in output.sampled]))
    return 1e3 * (time.perf_counter() - start)
