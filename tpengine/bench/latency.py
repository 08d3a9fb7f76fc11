"""Time to first token and per token for equal requests, by how many run at once.

A decode step of one sequence cannot be faster than one read of the weights in the form that they
have, without the tables of which it reads single rows. "floor" is the time of that read: the bytes
over the bandwidth, and its share of the step's time follows. On CPU the bandwidth is the median of
reads between the steps, because other processes use the same memory, or, if the next step is in
flight then, of reads before and after them; on a GPU it is that of a copy from device to device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from tpengine.bench import harness
from tpengine.bench.throughput import run_steps
from tpengine.bench.timing import ReadBandwidth, copy_bandwidth
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError
from tpengine.options import adder, option
from tpengine.worker.device import detect_device

_STEPS_PER_FLOOR = 8
_FLOOR_REPEATS = 2
_TRACED_TOKENS = 24
"""Enough for all sequences to decode at once; each token adds hundreds of lines to the timeline."""


@dataclass
class LatencyOptions(harness.ModelOptions):
    """Which requests are measured, and the files to write."""

    batch_sizes: str = option("1,2,4,8,16,32")
    """How many requests run at once: one or more numbers with commas between them."""
    input_len: int = option(64, at_least=1)
    """Prompt tokens of a request."""
    output_len: int = option(64, at_least=2, advice="the first token comes with the prompt")
    """Output tokens of a request."""
    trace: str | None = option(None, metavar="PREFIX")
    """Repeat each batch size with torch's profiler: write its timeline to PREFIX-N.json.gz, and
    print the time of each kernel."""
    plot: str | None = option(None, metavar="FILE")
    """Write a PNG of tokens/s over running sequences."""


add_arguments = adder(LatencyOptions, EngineArgs)


@dataclass(frozen=True)
class Point:
    """Figures at one batch size, in seconds, tokens per second and bytes per second."""

    batch_size: int
    first_token_s: float
    step_s: float
    bandwidth: float
    waited: float
    """Share of a step in which ranks in processes of their own wait for the driver."""

    @property
    def rate(self) -> float:
        """Output tokens per second while decoding."""
        return self.batch_size / self.step_s


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per batch size."""
    options = LatencyOptions.parse(args)
    most = args.max_num_seqs
    limits = f"integers from 1 to max_num_seqs = {most} (--max-num-seqs raises it)"
    fits = range(1, most + 1).__contains__
    sizes = list(map(int, harness.numbers("--batch-sizes", options.batch_sizes, fits, limits)))
    device = detect_device(args.device)
    measure_bandwidth = _bandwidth_of(device)  # before the engine takes the memory
    with harness.bench_engine(args) as (engine_args, engine):
        _measure(engine, 1, options.input_len, 4, measure_bandwidth)  # warm-up
        points = [
            _measure(engine, size, options.input_len, options.output_len, measure_bandwidth)
            for size in tqdm(sizes, desc="batch sizes", unit="size")
        ]
        step_bytes = sum(ledger.read_bytes for ledger in engine.stats().ledgers)
        model = args.shape or engine.get_model_config().model
        head = {"model": model, "floor": f"the time to read {step_bytes / 1e9:.3f} GB"}
        print(harness.report_head(engine_args, head, width=11))
        are_apart = engine_args.chosen_executor != "local"
        for point in points:
            floor_s = step_bytes / point.bandwidth
            print(
                f"batch {point.batch_size:>3}  first token {1000 * point.first_token_s:7.1f} ms   "
                f"step {1000 * point.step_s:7.2f} ms   {point.rate:8.1f} tokens/s   "
                f"floor {1000 * floor_s:6.2f} ms: {100 * floor_s / point.step_s:5.1f} % of it"
                f"{f'   ranks wait {100 * point.waited:4.1f} %' if are_apart else ''}"
            )
        for size in sizes if options.trace else []:
            print(_trace(engine, options, size))
    if options.plot:
        with harness.plot(options.plot, str(model), (6, 4)) as (panel,):
            panel.plot([p.batch_size for p in points], [p.rate for p in points], marker="o")
            panel.set_xscale("log", base=2)
            panel.set_xlabel("running sequences")
            panel.set_ylabel("output tokens/s")
            panel.set_ylim(bottom=0)
    return 0


def _bandwidth_of(device: str) -> Callable[[], float]:
    """Returns a function that measures the bandwidth of the floor, in bytes per second."""
    if device == "cpu":
        return partial(ReadBandwidth().measure, _FLOOR_REPEATS)
    copy = copy_bandwidth(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    return lambda: copy


def _measure(
    engine: LLMEngine,
    batch_size: int,
    input_len: int,
    output_len: int,
    measure_bandwidth: Callable[[], float],
) -> Point:
    """Runs `batch_size` equal requests. The step is the median of the steps that only decode, and
    the bandwidth the median of measurements between them.

    Raises:
        ConfigError: no step decoded all the requests.
    """
    rng = random.Random(f"{batch_size}:{output_len}")
    vocab_size = engine.get_model_config().vocab_size
    params = replace(harness.GREEDY, max_tokens=output_len)
    for i in range(batch_size):
        prompt = [rng.randrange(vocab_size) for _ in range(input_len)]
        engine.add_request(str(i), None, params, prompt_token_ids=prompt)
    first_token_s = 0.0
    decodes: list[float] = []
    waits: list[float] = []
    rates = [measure_bandwidth()]
    is_idle_between = engine.get_scheduler_config().max_steps_in_flight == 1
    start = time.perf_counter()
    for step in run_steps(engine):
        if not decodes and step.num_output_tokens:
            first_token_s = time.perf_counter() - start
        if step.num_prefill_tokens == 0 and step.num_output_tokens == batch_size:
            if is_idle_between and len(decodes) % _STEPS_PER_FLOOR == 0:
                rates.append(measure_bandwidth())
            decodes.append(step.step_s)
            waits.append(step.waited_s)
    rates.append(measure_bandwidth())
    if not decodes:
        raise ConfigError(
            f"{batch_size} sequences of {input_len} + {output_len} tokens were never decoded all "
            "at once: the first ends before the last has its prompt, or the KV cache is too "
            "small; raise --output-len or the cache, or leave this batch size out"
        )
    step_s, waited_s, bandwidth = map(statistics.median, (decodes, waits, rates))
    return Point(batch_size, first_token_s, step_s, bandwidth, waited_s / step_s)


def _trace(engine: LLMEngine, options: LatencyOptions, batch_size: int) -> str:
    """Writes a timeline; returns a table of the kernels with the longest times."""
    with torch.profiler.profile() as profile:  # of the CPU, and of a GPU if there is one
        tokens = min(options.output_len, _TRACED_TOKENS)
        _measure(engine, batch_size, options.input_len, tokens, lambda: 1.0)
    path = f"{options.trace}-{batch_size}.json.gz"
    profile.export_chrome_trace(path)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=60)
    return f"batch {batch_size}: {path}\n{table}"
