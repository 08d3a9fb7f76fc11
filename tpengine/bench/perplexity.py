"""The quality of a dtype or quantization: loss and perplexity of one text under several variants.

With --text it is a text that the model did not write, cut into windows that leave room for one
more token in --max-model-len.
Without, the text is documents that the model writes itself, in float32 at temperature 1 and from
fixed seeds: no model predicts such a text better than the float32 model. Every token after the
first of a window counts. --dtype, --quantization and --kv-cache-dtype have no effect. A line ends
with what became of a quantised file.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tpengine.bench.harness import BenchOptions, report_head
from tpengine.config import QUANTIZATIONS
from tpengine.engine.startup import weights_form
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.llm import LLM
from tpengine.options import adder, option
from tpengine.sampling_params import SamplingParams
from tpengine.worker.device import detect_device

_HALF: dict[str, Any] = {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto"}
_EXACT = _HALF | {"dtype": "float32"}
_WRITTEN_TOKENS = 256
_OPENINGS = ["Hello, my name is", "The capital of", "Once upon a time", "The future of"]


@dataclass
class TextOptions(BenchOptions):
    """The text to measure."""

    text: str | None = option(None, metavar="FILE")
    """Text to measure, that the model did not write; default: documents that it writes."""
    num_documents: int = option(64, at_least=1)
    """Documents that the model writes."""


add_arguments = adder(TextOptions, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per variant."""
    options = TextOptions.parse(args)
    engine_args = EngineArgs.from_cli_args(args)
    if options.text:
        windows = read_windows(options.text, engine_args)
    else:
        windows = _write(options.num_documents, engine_args)
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError("the text has less than two tokens: give a longer --text")
    num_tokens = sum(len(window) - 1 for window in windows)
    text = f"{num_tokens} predicted tokens in windows of {max(map(len, windows))}"
    print(report_head(None, {"model": engine_args.model, "text": text}, width=15))
    print_variants(engine_args, windows)
    return 0


def print_variants(engine_args: EngineArgs, windows: list[list[int]]) -> float:
    """Measures and prints a line per variant; returns the loss in float32.

    Device or model may refuse a variant: then its line says why, and the others are measured.
    """
    base, form = mean_loss(replace(engine_args, **_EXACT), windows)
    print(format_loss("float32", base, base, form), flush=True)
    variants = _variants(detect_device(engine_args.device))
    for name, fields in tqdm(variants.items(), desc="variants", unit="variant"):
        try:
            loss, form = mean_loss(replace(engine_args, **fields), windows)
        except ConfigError as error:
            print(f"{name:<23} refused: {error}", flush=True)
        else:
            print(format_loss(name, loss, base, form), flush=True)
    return base


def _variants(device: str) -> dict[str, dict[str, Any]]:
    """The engine's arguments by variant, on cpu or cuda."""
    cache = "int8" if device == "cpu" else "fp8"
    rounded = {f"bfloat16 {kind}": _HALF | {"quantization": kind} for kind in QUANTIZATIONS}
    kept = _HALF | {"kv_cache_dtype": cache}
    return {"bfloat16": _HALF, f"bfloat16, {cache} KV cache": kept} | rounded


def format_loss(name: str, loss: float, base: float, form: str = "") -> str:
    """A line of the report; losses are in nats per token, `form` as of `mean_loss`."""
    change = f"({loss - base:+.5f}, {100 * math.expm1(loss - base):+.2f} %)"
    line = f"{name:<23} loss {loss:.5f}   perplexity {math.exp(loss):.4f}   {change}"
    return f"{line}   {form}" if form else line


def _llm(engine_args: EngineArgs) -> LLM:
    return LLM(**vars(replace(engine_args, disable_log_stats=True)))


def read_windows(path: str, engine_args: EngineArgs) -> list[list[int]]:
    """Token ids of a text in windows as long as the model's context allows."""
    with _llm(engine_args) as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError("--text needs a model with a tokenizer")
        try:
            ids = tokenizer.encode(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path} cannot be read: {error}") from None
        size = llm.llm_engine.get_model_config().max_model_len - 1  # each asks for an output token
    return [ids[i : i + size] for i in range(0, len(ids) - 1, size)]


def _write(num_documents: int, engine_args: EngineArgs) -> list[list[int]]:
    seeds = range(num_documents)
    prompts = [_OPENINGS[seed % len(_OPENINGS)] for seed in seeds]
    params = [SamplingParams(max_tokens=_WRITTEN_TOKENS, seed=seed) for seed in seeds]
    with _llm(replace(engine_args, **_EXACT)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def mean_loss(engine_args: EngineArgs, windows: list[list[int]]) -> tuple[float, str]:
    """Returns the mean of minus the log probability of every token after the first of its window,
    and what became of a quantised file; empty for other files."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    with _llm(engine_args) as llm:
        for output in llm.generate(None, params, windows, use_tqdm=False):
            if output.prompt_logprobs is None:
                raise EngineError(f"a window of the text could not be computed: {output.error}")
            for token_id, candidates in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            ):
                if candidates is not None:
                    total += candidates[token_id].logprob
                    count += 1
        form = weights_form(llm.llm_engine.stats().ledgers)
    return -total / count, form
