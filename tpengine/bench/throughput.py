"""Tokens per second of the whole engine (scheduling, model, sampling, text) on a mixed workload.

All requests arrive at the start. Prompt and output lengths are lognormal (median 67, 4 to 512) and
seeded; end tokens are ignored, so that every run does the same work. "outside the model" is the
share of the time that is not in forward, logits and sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tqdm import tqdm

from tpengine.bench import harness
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.stats import StepStats
from tpengine.engine_args import EngineArgs
from tpengine.options import adder, option
from tpengine.sampling_params import SamplingParams

_WARM_UP_REQUESTS = 4
_WARM_UP_OUTPUT = 4


@dataclass
class ThroughputOptions(harness.ModelOptions):
    """The workload, and how its tokens are drawn."""

    num_requests: int = option(32, at_least=1)
    """Requests of a run."""
    runs: int = option(3, at_least=1)
    """Runs; the figures are those of the median run."""
    workload_seed: int = option(0)
    """Seed of the lengths and token ids."""
    temperature: float = option(0.0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: float = option(1.0)
    """Draw from the most likely tokens whose probabilities reach this sum; 1 draws from all."""

    def params(self) -> SamplingParams:
        """Parameters of each request, without its number of output tokens."""
        return replace(harness.GREEDY, temperature=self.temperature, top_p=self.top_p)


add_arguments = adder(ThroughputOptions, EngineArgs)


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
    options = ThroughputOptions.parse(args)
    with harness.bench_engine(args) as (engine_args, engine):
        warm_up, *workloads = make_workloads(options, engine)
        run_once(engine, warm_up, options.params())
        results = [
            run_once(engine, workload, options.params())
            for workload in tqdm(workloads, desc="runs", unit="run")
        ]
        model = args.shape or engine.get_model_config().model
        print(harness.report_head(engine_args, {"model": model}))
        print_runs(results, workloads[0])
    return 0


def make_workloads(options: ThroughputOptions, engine: LLMEngine) -> list[harness.Workload]:
    """A short workload to warm up, and that of each run. All differ in their token ids."""
    model = engine.get_model_config()
    size = options.num_requests, model.vocab_size, options.workload_seed, model.max_model_len
    *workloads, last = (harness.mixed_requests(*size, run) for run in range(options.runs + 1))
    return [[(prompt, _WARM_UP_OUTPUT) for prompt, _ in last[:_WARM_UP_REQUESTS]], *workloads]


def run_once(engine: LLMEngine, workload: harness.Workload, params: SamplingParams) -> RunResult:
    """Serves all requests; returns the figures of every step."""
    start = time.perf_counter()
    for i, (prompt, num_output) in enumerate(workload):
        engine.add_request(
            str(i), None, replace(params, max_tokens=num_output), prompt_token_ids=prompt
        )
    steps = list(run_steps(engine))
    return RunResult(time.perf_counter() - start, steps)


def print_runs(results: list[RunResult], workload: harness.Workload) -> None:
    """Prints the figures of the median run, and the rate of every run."""
    median = sorted(results, key=lambda result: result.elapsed_s)[len(results) // 2]
    steps, elapsed_s = median.steps, median.elapsed_s
    prefill = sum(step.num_prefill_tokens for step in steps)
    times_ms = [1000 * step.step_s for step in steps]
    cuts = statistics.quantiles(times_ms, n=100) if len(times_ms) > 1 else times_ms * 99
    outside = max(0.0, 1 - sum(step.model_s for step in steps) / elapsed_s)
    rates = harness.median_of([result.output_rate for result in results], "", 1)
    print(f"requests            {len(workload)}, {len(steps)} steps, {elapsed_s:.2f} s")
    print(f"output tokens/s     {rates}")
    print(f"prefill tokens/s    {prefill / elapsed_s:.1f}")
    print(f"step, ms            median {cuts[49]:.2f}, p90 {cuts[89]:.2f}, p99 {cuts[98]:.2f}")
    print(f"outside the model   {100 * outside:.2f} %")


def run_steps(engine: LLMEngine) -> Iterator[StepStats]:
    """Steps the engine until no request is unfinished; yields the figures of each computed step.

    A step that only reports an end (an abort, a request that cannot be served) leaves the figures
    of an earlier step in `last_step`, which must not be counted twice.
    """
    while engine.has_unfinished_requests():
        before = engine.last_step
        engine.step()
        if engine.last_step is not None and engine.last_step is not before:
            yield engine.last_step
