"""The loss on a text of `tpengine bench perplexity`'s variants beside that of llama.cpp's types.

All start from the same weights in 16 bits and read the same windows of token ids; each is compared
with our float32. llama.cpp's types are the mixtures that its quantizer writes.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from benchmarks.engines import EngineProcess, started
from benchmarks.peer_files import ModelFiles
from tpengine.bench.harness import report_head
from tpengine.bench.perplexity import format_loss, print_variants, read_windows
from tpengine.engine_args import EngineArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the text, its windows, and llama.cpp's types."""
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 or embedded (default: %(default)s)")
    add("--text", required=True, help="a file that the model did not write")
    add("--window", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    kinds = "llama.cpp's types, separated by commas (default: %(default)s)"
    add("--types", default="BF16,Q8_0,Q4_0", help=kinds)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per variant and type."""
    files = ModelFiles(args.model)
    engine_args = EngineArgs(str(files.whole()), device="cpu", max_model_len=args.window + 1)
    windows = [one for one in read_windows(args.text, engine_args) if len(one) > 1]
    num_tokens = sum(len(window) - 1 for window in windows)
    text = f"{num_tokens} predicted tokens of {args.text}"
    print(report_head(None, {"model": args.model, "text": text}, width=15))
    base = print_variants(engine_args, windows)
    with started([f"llama.cpp:{kind}" for kind in args.types.split(",")], files) as engines:
        for engine in engines:
            loss = _loss_of(engine, windows) / num_tokens
            print(format_loss(engine.name, loss, base), flush=True)
    return 0


def _loss_of(engine: EngineProcess, windows: list[list[int]]) -> float:
    asked = tqdm(windows, desc=engine.name, unit="window")
    return sum(engine.ask({"window": window})["loss"] for window in asked)
