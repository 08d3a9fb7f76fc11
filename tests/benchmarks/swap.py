"""Two ways back after preemption: the blocks from the host, or the tokens computed again.

For prompts of several lengths it prints the time to copy a sequence's blocks to the host and back,
and the time to compute them, both on an engine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from benchmarks.common import (
    add_engine_arguments,
    add_numbers,
    dummy_model,
    first_token_s,
    random_prompt,
)
from tpengine.bench.harness import report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.messages import BlockMoves
from tpengine.worker.cache_engine import CacheEngine
from tpengine.worker.device import resolve_dtype

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=LENGTHS,
        help=f"prompt tokens (default: {' '.join(map(str, LENGTHS))})",
    )
    add_numbers(parser, runs=(3, "median of these"))
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    longest = max(args.lengths)
    with (
        dummy_model(args, longest + 1, enable_prefix_caching=False) as settings,
        LLMEngine.from_engine_args(settings) as engine,
    ):
        cache, shape = make_cache(engine, settings, longest)
        print(report_head(settings, {"work": f"{args.shape}, {shape}"}))
        print("prompt tokens    out and in, ms    compute again, ms    ratio")
        for length in args.lengths:
            blocks = -(-length // settings.block_size)
            prompt = random_prompt(engine, length, seed=length)
            # The first of each pays for memory that was never touched.
            swaps_s = [time_swap(cache, blocks) for _ in range(args.runs + 1)]
            computes_s = [first_token_s(engine, prompt) for _ in range(args.runs + 1)]
            swap_s, compute_s = statistics.median(swaps_s[1:]), statistics.median(computes_s[1:])
            print(
                f"{length:13d}    {1e3 * swap_s:14.2f}    {1e3 * compute_s:17.1f}    "
                f"{compute_s / swap_s:5.0f}"
            )
    return 0


def make_cache(engine: LLMEngine, args: EngineArgs, longest: int) -> tuple[CacheEngine, str]:
    """A cache of the model's shape, with room for one sequence on the device and on the host."""
    model, device = engine.get_model_config(), "cuda" if torch.cuda.is_available() else "cpu"
    blocks = -(-longest // args.block_size)
    shape = (args.block_size, model.num_layers, model.total_num_kv_heads, model.head_dim)
    dtype = resolve_dtype(args.dtype, device)
    cache = CacheEngine(torch.device(device), dtype, blocks, *shape, num_host_blocks=blocks)
    for k_cache, v_cache in cache.kv_caches:
        k_cache.zero_()
        v_cache.zero_()
    return cache, f"{model.num_layers} layers of {shape[2]} KV heads of {shape[3]}"


def time_swap(cache: CacheEngine, num_blocks: int) -> float:
    """Seconds to copy so many blocks out and back in, scattered as they are after a while."""
    scattered = random.Random(0).sample(range(num_blocks), num_blocks)
    there = list(enumerate(scattered))
    start = time.perf_counter()
    cache.move(BlockMoves(swap_outs=there))
    cache.move(BlockMoves(swap_ins=[(host, block) for block, host in there]))
    for _ in cache.kv_caches:  # waits for the copies of each layer
        pass
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
