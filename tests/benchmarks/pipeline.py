"""Stages of a pipeline beside one process, on the same requests, alternated: decodes of many
streams, and a long prompt. Each side has the same number of threads in all."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.common import add_numbers, add_shape_argument, alternate
from tpengine import LLM, SamplingParams
from tpengine.bench.harness import median_of, report_head, shape_folder

_PROMPT_LEN = 32
_CACHE_GIB = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_shape_argument(parser)
    add_numbers(
        parser,
        stages=(2, "stages of the pipeline"),
        streams=(64, "requests at once"),
        tokens=(48, "output tokens of each"),
        prompt_len=(4000, "tokens of the long prompt"),
        rounds=(5, "rounds"),
    )
    parser.add_argument("--pp-layer-partition", help="layers of each stage, such as 7,5")
    parser.add_argument("--quantization")
    parser.add_argument("--dtype", default="auto")


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    sides = {1: "one process", args.stages: f"{args.stages} stages"}
    results = {}
    with ExitStack() as stack:
        folder = stack.enter_context(shape_folder(args.shape, 2 * args.prompt_len))
        engines = {count: stack.enter_context(_engine(folder, count, args)) for count in sides}
        for name, measure in (("decode", _decode_s), ("prompt", _prompt_s)):
            times = alternate(
                list(sides),
                args.rounds,
                lambda count, number, measure=measure: measure(engines[count], args, number),
                warm_ups=1,
            )
            for count, side in sides.items():
                results[f"{name}, {side}"] = median_of(times[count], " s")
            ratios = [whole / staged for whole, staged in zip(*times.values(), strict=True)]
            results[f"{name}, speed"] = median_of(ratios, "")
    print(report_head(None, results, 24))
    return 0


@contextmanager
def _engine(folder: str, num_stages: int, args: argparse.Namespace) -> Iterator[LLM]:
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        quantization=args.quantization,
        pipeline_parallel_size=num_stages,
        pp_layer_partition=args.pp_layer_partition if num_stages > 1 else None,
        executor="local" if num_stages == 1 else "processes",
        cpu_kv_cache_space=_CACHE_GIB / num_stages,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def _decode_s(llm: LLM, args: argparse.Namespace, number: int) -> float:
    """Seconds for the output tokens of all streams, short prompts included."""
    prompts = [
        [3 + (7 * stream + place + number) % 1000 for place in range(_PROMPT_LEN)]
        for stream in range(args.streams)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def _prompt_s(llm: LLM, args: argparse.Namespace, number: int) -> float:
    """Seconds to the first token after the long prompt."""
    ids = [3 + (5 * j + number) % 1000 for j in range(args.prompt_len)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return time.perf_counter() - start
