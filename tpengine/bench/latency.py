"""Time to first token and per token for equal requests, by how many run at once.

A decode step of one sequence cannot be faster than reading the weights once: "floor" is their bytes
over the measured bandwidth (reads on CPU, again and again between the steps, since neighbours take
their part of a shared machine's memory, and the median of them; device-to-device copies on a GPU),
and the share is floor over step.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from tpengine.bench.cuda_timing import measure_ceilings
from tpengine.bench.machine import ReadBandwidth, describe_machine, import_pyplot, report_head
from tpengine.bench.predictions import DecodeStep, compare
from tpengine.bench.throughput import run_steps
from tpengine.bench.workload import SHAPES, shape_folder
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.worker.device import cache_dtype, detect_device, resolve_dtype

_STEPS_PER_FLOOR = 8
_FLOOR_REPEATS = 2
_TRACED_TOKENS = 24
"""Enough for all sequences to decode at once; a timeline grows by hundreds of lines a token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument(
        "--batch-sizes",
        default="1,2,4,8,16,32",
        help="how many run at once, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--input-len", type=int, default=64, help="prompt tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--output-len", type=int, default=64, help="output tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="dummy weights of this shape instead of a model"
    )
    parser.add_argument(
        "--trace",
        metavar="PREFIX",
        help="afterwards, once more under torch's profiler: a timeline of each batch size in "
        "PREFIX-N.json.gz, its kernels' times printed",
    )
    parser.add_argument("--plot", metavar="FILE", help="PNG of tokens/s over running sequences")
    EngineArgs.add_cli_args(parser)


@dataclass(frozen=True)
class Point:
    """Figures at one batch size, in seconds, tokens per second and bytes per second."""

    batch_size: int
    first_token_s: float
    step_s: float
    bandwidth: float

    @property
    def rate(self) -> float:
        """Output tokens per second while decoding."""
        return self.batch_size / self.step_s


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per batch size."""
    engine_args = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    sizes = _check(args)
    if args.plot:
        import_pyplot()
    measure: Callable[[], float]
    if detect_device(args.device) == "cuda":  # before the engine takes the memory
        ceiling = measure_ceilings(torch.device("cuda", torch.cuda.current_device())).copy
        torch.cuda.empty_cache()
        measure = lambda: ceiling  # noqa: E731
    else:
        reads = ReadBandwidth()
        measure = lambda: reads.measure(_FLOOR_REPEATS)  # noqa: E731
    with contextlib.ExitStack() as stack:
        if args.shape is not None:
            folder = stack.enter_context(shape_folder(args.shape))
            engine_args = replace(engine_args, model=folder, tokenizer=None, load_format="dummy")
        engine = stack.enter_context(LLMEngine.from_engine_args(engine_args))
        _measure(engine, 1, args.input_len, 4, measure)
        points = [
            _measure(engine, size, args.input_len, args.output_len, measure)
            for size in tqdm(sizes, desc="batch sizes", unit="size")
        ]
        step_bytes = _step_bytes(engine, detect_device(args.device))
        model = args.shape or engine.get_model_config().model
        print(report_head(engine_args, width=11))
        print(f"model      {model}")
        print(f"floor      the time to read {step_bytes / 1e9:.3f} GB")
        for point in points:
            floor_s = step_bytes / point.bandwidth
            print(
                f"batch {point.batch_size:>3}  first token {1000 * point.first_token_s:7.1f} ms   "
                f"step {1000 * point.step_s:7.2f} ms   {point.rate:8.1f} tokens/s   "
                f"floor {1000 * floor_s:6.2f} ms: {100 * floor_s / point.step_s:5.1f} % of it"
                + _prediction(engine, args, point, step_bytes)
            )
        for size in sizes if args.trace else []:
            print(_trace(engine, args, size))
    if args.plot:
        _plot(args.plot, str(model), points)
    return 0


def _check(args: argparse.Namespace) -> list[int]:
    """The batch sizes.

    Raises:
        ConfigError: what is asked for cannot be measured, found out before anything is.
    """
    words = args.batch_sizes.split(",")
    sizes = [int(word) if word.strip().isdecimal() else 0 for word in words]
    for word, size in zip(words, sizes, strict=True):
        if not 1 <= size <= args.max_num_seqs:
            raise ConfigError(
                f"--batch-sizes must be integers from 1 to max_num_seqs = {args.max_num_seqs}, "
                f"got {word!r}; leave it out, or raise --max-num-seqs"
            )
    if args.input_len < 1 or args.output_len < 2:
        raise ConfigError(
            "--input-len must be at least 1 and --output-len at least 2, as the first token comes "
            f"with the prompt; got {args.input_len} and {args.output_len}"
        )
    return sizes


def _step_bytes(engine: LLMEngine, device: str) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's table, of which it takes
    single rows, and that of rotary angles. A tied output head reads the table itself on a GPU; on
    CPU it has a packed copy of its own."""
    config = engine.get_model_config()
    dtype = resolve_dtype(config.dtype, device)
    table = config.vocab_size * int(config.hf_config["hidden_size"]) * dtype.itemsize
    if device != "cpu" and config.hf_config.get("tie_word_embeddings"):
        table = 0
    angles = 4 * config.max_model_len * config.head_dim
    if not config.hf_config.get("rope_parameters"):
        angles = 0
    return sum(engine.get_weights_bytes()) - table - angles


def _prediction(engine: LLMEngine, args: argparse.Namespace, point: Point, step_bytes: int) -> str:
    """Of the step's time; empty where there is no prediction: on CPU, and without what makes a
    GPU's steps follow each other closely."""
    device = detect_device(args.device)
    if device == "cpu" or args.enforce_eager or not args.async_scheduling:
        return ""
    config = engine.get_model_config()
    context = point.batch_size * (args.input_len + args.output_len / 2)
    item = cache_dtype(args.kv_cache_dtype, resolve_dtype(config.dtype, device)).itemsize
    kv_bytes = 2 * context * config.total_num_kv_heads * config.head_dim * item
    step = DecodeStep(step_bytes, kv_bytes, config.num_layers, point.batch_size)
    return f"   {compare(point.step_s, step.seconds(point.bandwidth))}"


def _measure(
    engine: LLMEngine,
    batch_size: int,
    input_len: int,
    output_len: int,
    measure_bandwidth: Callable[[], float],
) -> Point:
    """Runs `batch_size` equal requests; the step is the median of the decode-only ones, and the
    bandwidth that of measurements between them.

    Raises:
        ConfigError: there was no step in which all were decoding.
    """
    rng = random.Random(f"{batch_size}:{output_len}")
    vocab_size = engine.get_model_config().vocab_size
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=output_len,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for i in range(batch_size):
        prompt = [rng.randrange(vocab_size) for _ in range(input_len)]
        engine.add_request(str(i), None, params, prompt_token_ids=prompt)
    start = time.perf_counter()
    first_token_s, decodes, rates = 0.0, [], []
    for step in run_steps(engine):
        if not decodes and step.num_output_tokens:
            first_token_s = time.perf_counter() - start
        if step.num_prefill_tokens == 0 and step.num_output_tokens == batch_size:
            if len(decodes) % _STEPS_PER_FLOOR == 0:
                rates.append(measure_bandwidth())
            decodes.append(step.step_s)
    if not decodes:
        raise ConfigError(
            f"{batch_size} sequences of {input_len} + {output_len} tokens were never decoded all "
            "at once: the first ends before the last has its prompt, or the KV cache is too "
            "small; raise --output-len or the cache, or leave this batch size out"
        )
    return Point(batch_size, first_token_s, statistics.median(decodes), statistics.median(rates))


def _trace(engine: LLMEngine, args: argparse.Namespace, batch_size: int) -> str:
    """Writes a timeline; returns where the time went, by kernel."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        tokens = min(args.output_len, _TRACED_TOKENS)
        _measure(engine, batch_size, args.input_len, tokens, lambda: 1.0)
    path = f"{args.trace}-{batch_size}.json.gz"
    profile.export_chrome_trace(path)
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=60)
    return f"batch {batch_size}: {path}\n{table}"


def _plot(path: str, model: str, points: list[Point]) -> None:
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([p.batch_size for p in points], [p.rate for p in points], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("running sequences")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{model}, {describe_machine()}", fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
