"""How fast prompts of given lengths are read, one at a time, as a share of a plain product.

Share: operations per second of linear layers and causal attention, divided by those of a
2048 x 2048 x 2048 product by torch in the same dtype, measured before each prompt.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from tqdm import tqdm

from benchmarks.common import (
    add_engine_arguments,
    add_numbers,
    dummy_model,
    first_token_s,
    random_prompt,
)
from tpengine.bench.harness import median_of, report_head
from tpengine.bench.timing import fastest_s
from tpengine.config import ModelConfig
from tpengine.engine.llm_engine import LLMEngine
from tpengine.worker.device import detect_device, resolve_dtype

_SIZE = 2048
_REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(parser, runs=(5, "prompts of each length"))
    text = "prompt tokens (default: 512 2048 8000)"
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8000], help=text)
    add_engine_arguments(parser)
    parser.set_defaults(shape="smollm2-135m")


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per length."""
    results: dict[str, str] = {"model": args.shape}
    with (
        dummy_model(args, max(args.lengths) + 1) as settings,
        LLMEngine.from_engine_args(settings) as engine,
    ):
        device = detect_device(args.device)
        matrix = torch.randn(_SIZE, _SIZE).to(device, resolve_dtype(args.dtype, device))
        product = partial(torch.mm, matrix, matrix.T)
        first_token_s(engine, random_prompt(engine, min(args.lengths), seed=0))  # warm-up
        for length in tqdm(args.lengths, desc="lengths", unit="length"):
            flop = prompt_flop(engine.get_model_config(), length)
            rates, shares = [], []
            for index in range(args.runs):
                rate = 2 * _SIZE**3 / fastest_s(product, _REPEATS)
                seconds = first_token_s(engine, random_prompt(engine, length, length + index))
                rates.append(length / seconds)
                shares.append(100 * flop / seconds / rate)
            results[f"{length} tokens"] = (
                f"tokens/s {median_of(rates, '', 0)}; share of the product "
                f"{statistics.median(shares):.1f} %"
            )
    print(report_head(settings, results))
    return 0


def prompt_flop(model: ModelConfig, length: int) -> float:
    """Operations of linear layers and causal attention for a prompt of a Llama. In the last layer
    only the last token goes through what follows attention."""
    hidden, inner = model.hf_config["hidden_size"], model.hf_config["intermediate_size"]
    heads = model.total_num_heads * model.head_dim
    qkv = hidden * (heads + 2 * model.total_num_kv_heads * model.head_dim)
    rest = heads * hidden + 3 * hidden * inner
    attention = heads * (length + 1)  # half of all pairs, in two products
    per_token = 2 * (model.num_layers * (qkv + attention) + (model.num_layers - 1) * rest)
    return float(per_token * length)
