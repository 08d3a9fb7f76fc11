"""Tokens per second of the whole engine (scheduling, model, sampling, text) on a mixed workload.

All requests are there at the start; prompt and output lengths are lognormal (median 67, 4 to 512)
and seeded, end tokens are ignored so that every run does the same work. Besides rates it prints
where a step's time goes: "outside the model" is all but forward, logits and sampling.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass, replace

from tqdm import tqdm

from tpengine.bench.machine import describe_commit, describe_machine
from tpengine.bench.workload import SHAPES, mixed_requests, shape_folder
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.metrics import StepStats
from tpengine.engine_args import EngineArgs
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_WARM_UP_REQUESTS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument("--num-requests", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="median of these (default: 3)")
    parser.add_argument(
        "--workload-seed", type=int, default=0, help="fixes lengths and ids (default: 0)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="dummy weights of this shape instead of a model"
    )
    EngineArgs.add_cli_args(parser)


@dataclass(frozen=True)
class RunResult:
    """One pass over the workload."""

    elapsed_s: float
    steps: list[StepStats]

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return sum(step.num_output_tokens for step in self.steps) / self.elapsed_s


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    engine_args = EngineArgs.from_cli_args(args)
    with contextlib.ExitStack() as stack:
        if args.shape is not None:
            folder = stack.enter_context(shape_folder(args.shape))
            engine_args = replace(engine_args, model=folder, tokenizer=None, load_format="dummy")
        engine_args = replace(engine_args, disable_log_stats=True)
        engine = stack.enter_context(LLMEngine.from_engine_args(engine_args))
        model = engine.get_model_config()
        requests = mixed_requests(
            args.num_requests, model.vocab_size, args.workload_seed, model.max_model_len
        )
        params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        run_once(engine, [(p, 4) for p, _ in requests[:_WARM_UP_REQUESTS]], params)
        results = [
            run_once(engine, requests, params)
            for _ in tqdm(range(args.runs), desc="runs", unit="run")
        ]
        results.sort(key=lambda result: result.output_rate)
        print_report(args, engine, results)
    return 0


def run_once(
    engine: LLMEngine, requests: list[tuple[list[int], int]], params: SamplingParams
) -> RunResult:
    """Serves all requests and times every step."""
    steps: list[StepStats] = []
    start = time.perf_counter()
    for i, (prompt, num_output) in enumerate(requests):
        engine.add_request(str(i), None, replace(params, max_tokens=num_output), prompt)
    while engine.has_unfinished_requests():
        engine.step()
        if engine.last_step is not None:
            steps.append(engine.last_step)
    return RunResult(time.perf_counter() - start, steps)


def print_report(args: argparse.Namespace, engine: LLMEngine, results: list[RunResult]) -> None:
    """Prints the figures of the median run, and the spread."""
    median = results[len(results) // 2]
    rates = ", ".join(f"{result.output_rate:.0f}" for result in results)
    steps = median.steps
    prefill = sum(step.num_prefill_tokens for step in steps)
    times_ms = sorted(1000 * step.step_s for step in steps)
    deciles = statistics.quantiles(times_ms, n=100) if len(times_ms) > 1 else times_ms * 99
    outside = 1 - sum(step.model_s for step in steps) / median.elapsed_s
    name = args.shape or engine.get_model_config().model
    print(f"machine             {describe_machine()}")
    print(f"commit              {describe_commit()}")
    print(f"model               {name}, dtype {args.dtype}")
    print(f"requests            {args.num_requests}, {len(steps)} steps, {median.elapsed_s:.2f} s")
    print(f"output tokens/s     {median.output_rate:.1f}   (runs: {rates})")
    print(f"prefill tokens/s    {prefill / median.elapsed_s:.1f}")
    print(
        f"step, ms            median {deciles[49]:.2f}, p90 {deciles[89]:.2f}, "
        f"p99 {deciles[98]:.2f}"
    )
    print(f"outside the model   {100 * outside:.2f} %")
