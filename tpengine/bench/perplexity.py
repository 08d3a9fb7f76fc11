"""The quality of a dtype or quantization: perplexity of one text under several variants.

The text is --text, or documents that the model writes itself, in float32 at temperature 1 and from
fixed seeds: no model predicts such a text better than the float32 model. --dtype, --quantization
and --kv-cache-dtype have no effect.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tpengine.bench.harness import BenchOptions, report_head
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError
from tpengine.llm import LLM
from tpengine.options import option
from tpengine.sampling_params import SamplingParams

_PLAIN = {"quantization": None, "kv_cache_dtype": "auto"}
_VARIANTS: dict[str, dict[str, Any]] = {
    "float32": _PLAIN | {"dtype": "float32"},
    "bfloat16": _PLAIN | {"dtype": "bfloat16"},
    "bfloat16, int8 KV cache": _PLAIN | {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16 int8": _PLAIN | {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16 int4": _PLAIN | {"dtype": "bfloat16", "quantization": "int4"},
}
_WINDOW = 256
_OPENINGS = ["Hello, my name is", "The capital of", "Once upon a time", "The future of"]


@dataclass
class TextOptions(BenchOptions):
    """The text to measure."""

    text: str | None = option(None, metavar="FILE")
    """Text to measure; default: documents that the model writes."""
    num_documents: int = option(64, at_least=1)
    """Documents that the model writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    TextOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints a line per variant."""
    options = TextOptions.parse(args)
    engine_args = EngineArgs.from_cli_args(args)
    if options.text:
        windows = _read(options.text, engine_args)
    else:
        windows = _write(options.num_documents, engine_args)
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError("the text has less than two tokens: give a longer --text")
    num_tokens = sum(len(window) - 1 for window in windows)
    lines = {"model": engine_args.model, "text": f"{num_tokens} predicted tokens"}
    print(report_head(None, lines, width=15))
    base: float | None = None
    for name, fields in tqdm(_VARIANTS.items(), desc="variants", unit="variant"):
        perplexity = _perplexity(replace(engine_args, **fields), windows)
        base = base or perplexity
        print(f"{name:<23} perplexity {perplexity:.4f}   ({100 * (perplexity / base - 1):+.2f} %)")
    return 0


def _llm(engine_args: EngineArgs) -> LLM:
    return LLM(**vars(replace(engine_args, disable_log_stats=True)))


def _read(path: str, engine_args: EngineArgs) -> list[list[int]]:
    with _llm(engine_args) as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None:
            raise ConfigError("--text needs a model with a tokenizer")
        try:
            ids = tokenizer.encode(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path} cannot be read: {error}") from None
    return [ids[i : i + _WINDOW] for i in range(0, len(ids) - 1, _WINDOW)]


def _write(num_documents: int, engine_args: EngineArgs) -> list[list[int]]:
    prompts = [_OPENINGS[i % len(_OPENINGS)] for i in range(num_documents)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=_WINDOW) for i in range(len(prompts))
    ]
    with _llm(replace(engine_args, **_VARIANTS["float32"])) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def _perplexity(engine_args: EngineArgs, windows: list[list[int]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    with _llm(engine_args) as llm:
        for output in llm.generate(None, params, windows, use_tqdm=False):
            if output.prompt_logprobs is None:
                raise EngineError(f"a window of the text could not be computed: {output.error}")
            for token_id, found in zip(
                output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
            ):
                if found is not None:
                    total += found[token_id].logprob
                    count += 1
    return math.exp(-total / count)
