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

from tpengine.bench.groups import random_prompt
from tpengine.bench.machine import describe_commit, describe_machine
from tpengine.bench.throughput import run_once
from tpengine.bench.workload import SHAPES, mixed_requests, shape_folder
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument("--prefix-tokens", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--arrivals", type=int, default=6, help="prompts (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="on and off (default: %(default)s)")
    parser.add_argument(
        "--num-requests", type=int, default=16, help="that share nothing (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-124m", help="dummy weights of this shape"
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
        rates = [measure_pair(on, off, args, seed) for seed in tqdm(range(args.pairs))]
    later = statistics.median(times[1:])
    print(f"machine             {describe_machine()}")
    print(f"commit              {describe_commit()}")
    print(f"work                {args.shape}, dtype {args.dtype}")
    print(
        f"first token, ms     {1e3 * times[0]:.1f} for the first of {args.prefix_tokens} + "
        f"{args.suffix_tokens} tokens, median {1e3 * later:.1f} for the {len(times) - 1} after it: "
        f"{times[0] / later:.1f} times less"
    )
    ratios = sorted(on_rate / off_rate for on_rate, off_rate in rates)
    print(
        f"nothing shared      {statistics.median(r for r, _ in rates):.1f} output tokens/s on, "
        f"{statistics.median(r for _, r in rates):.1f} off; on / off: median "
        f"{statistics.median(ratios):.4f}, from {ratios[0]:.4f} to {ratios[-1]:.4f}"
    )
    return 0


def first_token_s(engine: LLMEngine, prompt: list[int]) -> float:
    """Seconds from arrival to the first token, in an engine that has nothing else to do."""
    start = time.perf_counter()
    engine.add_request("one", None, replace(_GREEDY, max_tokens=1), prompt)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def measure_pair(
    on: LLMEngine, off: LLMEngine, args: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """Output tokens per second with and without caching, on prompts that were never seen; which
    engine goes first changes from pair to pair."""
    model = on.get_model_config()
    requests = mixed_requests(args.num_requests, model.vocab_size, 100 + seed, 256)
    rates = {}
    for engine in (on, off) if seed % 2 else (off, on):
        rates[engine] = run_once(engine, requests, _GREEDY).output_rate
    return rates[on], rates[off]
