"""What prefix caching brings where prompts begin alike, and what it costs where they do not.

First: prompts with one long common beginning arrive one after another; time to the first token of
the first and of the later ones. Second: a workload that shares nothing, with caching on and off in
turn, in two engines of equal settings.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import replace

from tqdm import tqdm

from benchmarks.groups import random_prompt
from tpengine.bench.harness import SHAPES, mixed_requests, report_head, shape_folder
from tpengine.bench.throughput import RunResult, run_once
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument(
        "--prefix-tokens", type=int, default=1000, help="that prompts share (default: %(default)s)"
    )
    parser.add_argument(
        "--suffix-tokens", type=int, default=16, help="of each alone (default: %(default)s)"
    )
    parser.add_argument(
        "--arrivals", type=int, default=6, help="prompts that share it (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=9, help="of runs, caching on and off (default: %(default)s)"
    )
    parser.add_argument(
        "--num-requests",
        type=int,
        default=16,
        help="of a run, sharing nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default="llama-124m",
        help="dummy weights of this shape (default: %(default)s)",
    )
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shape_folder(args.shape))
        settings = replace(
            EngineArgs.from_cli_args(args),
            model=folder,
            load_format="dummy",
            disable_log_stats=True,
        )
        on, off = (
            stack.enter_context(
                LLMEngine.from_engine_args(replace(settings, enable_prefix_caching=caching))
            )
            for caching in (True, False)
        )
        prefix = random_prompt(on, args.prefix_tokens, seed=1)
        first_token_s(on, random_prompt(on, args.prefix_tokens, seed=2))
        times = [
            first_token_s(on, prefix + random_prompt(on, args.suffix_tokens, seed=10 + index))
            for index in range(args.arrivals)
        ]
        pairs = [measure_pair(on, off, args, seed) for seed in tqdm(range(args.pairs))]
    later = statistics.median(times[1:])
    print(report_head(EngineArgs.from_cli_args(args)))
    print(f"work                {args.shape}")
    print(
        f"first token, ms     {1e3 * times[0]:.1f} for the first of {args.prefix_tokens} + "
        f"{args.suffix_tokens} tokens, median {1e3 * later:.1f} for the {len(times) - 1} after it: "
        f"{times[0] / later:.1f} times less"
    )
    print(
        f"nothing shared      {statistics.median(on.output_rate for on, _ in pairs):.1f} output "
        f"tokens/s on, {statistics.median(off.output_rate for _, off in pairs):.1f} off"
    )
    for name, ratios in (
        ("on / off, rate", [on.output_rate / off.output_rate for on, off in pairs]),
        ("on / off, outside", [outside_s(on) / outside_s(off) for on, off in pairs]),
    ):
        middle = statistics.median(ratios)
        print(f"{name:19s} median {middle:.4f}, from {min(ratios):.4f} to {max(ratios):.4f}")
    extra = statistics.median(outside_s(on) - outside_s(off) for on, off in pairs)
    whole = statistics.median(off.elapsed_s for _, off in pairs)
    print(f"outside the model   caching adds {1e3 * extra:.2f} ms, {100 * extra / whole:.3f} %")
    return 0


def first_token_s(engine: LLMEngine, prompt: list[int]) -> float:
    """Seconds from arrival to the first token, in an engine that has nothing else to do."""
    start = time.perf_counter()
    engine.add_request("one", None, replace(_GREEDY, max_tokens=1), prompt_token_ids=prompt)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def measure_pair(
    on: LLMEngine, off: LLMEngine, args: argparse.Namespace, seed: int
) -> tuple[RunResult, RunResult]:
    """One pass with and one without caching, on prompts that were never seen; which engine goes
    first changes from pair to pair."""
    model = on.get_model_config()
    requests = mixed_requests(args.num_requests, model.vocab_size, 100 + seed, 256)
    results = {engine: run_once(engine, requests, _GREEDY) for engine in _in_turn(on, off, seed)}
    return results[on], results[off]


def outside_s(result: RunResult) -> float:
    """Seconds of a pass that were not spent in the model: all that caching can change."""
    return sum(step.step_s - step.model_s for step in result.steps)


def _in_turn(on: LLMEngine, off: LLMEngine, seed: int) -> tuple[LLMEngine, LLMEngine]:
    return (on, off) if seed % 2 else (off, on)
