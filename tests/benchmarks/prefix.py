"""What prefix caching brings where prompts begin alike, and what it costs where they do not.

First: prompts with one long common beginning arrive one after another; time to the first token of
the first and of the later ones. Second: a workload that shares nothing, with caching on and off in
turn, in two engines of equal settings.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from benchmarks.common import (
    add_engine_arguments,
    add_numbers,
    dummy_model,
    first_token_s,
    random_prompt,
    run_pairs,
)
from tpengine.bench.harness import mixed_requests, report_head
from tpengine.bench.throughput import RunResult
from tpengine.engine.llm_engine import LLMEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        prefix_tokens=(1000, "that prompts share"),
        suffix_tokens=(16, "of each alone"),
        arrivals=(6, "prompts that share it"),
        pairs=(9, "of runs, caching on and off"),
        num_requests=(16, "of a run, sharing nothing"),
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    with (
        dummy_model(args) as settings,
        LLMEngine.from_engine_args(replace(settings, enable_prefix_caching=True)) as on,
        LLMEngine.from_engine_args(replace(settings, enable_prefix_caching=False)) as off,
    ):
        prefix = random_prompt(on, args.prefix_tokens, seed=1)
        first_token_s(on, random_prompt(on, args.prefix_tokens, seed=2))
        times = [
            first_token_s(on, prefix + random_prompt(on, args.suffix_tokens, seed=10 + index))
            for index in range(args.arrivals)
        ]
        vocab_size = on.get_model_config().vocab_size
        workloads = [  # of prompts that were never seen
            mixed_requests(args.num_requests, vocab_size, 100 + seed, 256)
            for seed in range(args.pairs)
        ]
        pairs = run_pairs(off, on, workloads)
    later = statistics.median(times[1:])
    on_rate = statistics.median(on.output_rate for _, on in pairs)
    off_rate = statistics.median(off.output_rate for off, _ in pairs)
    extra = statistics.median(outside_s(on) - outside_s(off) for off, on in pairs)
    whole = statistics.median(off.elapsed_s for off, _ in pairs)
    results = {
        "work": args.shape,
        "first token, ms": f"{1e3 * times[0]:.1f} for the first of {args.prefix_tokens} + "
        f"{args.suffix_tokens} tokens, median {1e3 * later:.1f} for the {len(times) - 1} after it: "
        f"{times[0] / later:.1f} times less",
        "nothing shared": f"{on_rate:.1f} output tokens/s on, {off_rate:.1f} off",
        "on / off, rate": spread([on.output_rate / off.output_rate for off, on in pairs]),
        "on / off, outside": spread([outside_s(on) / outside_s(off) for off, on in pairs]),
        "outside the model": f"caching adds {1e3 * extra:.2f} ms, {100 * extra / whole:.3f} %",
    }
    print(report_head(settings, results))
    return 0


def spread(ratios: list[float]) -> str:
    """The median and both ends."""
    middle = statistics.median(ratios)
    return f"median {middle:.4f}, from {min(ratios):.4f} to {max(ratios):.4f}"


def outside_s(result: RunResult) -> float:
    """Seconds of a pass that were not spent in the model: all that caching can change."""
    return sum(step.step_s - step.model_s for step in result.steps)
