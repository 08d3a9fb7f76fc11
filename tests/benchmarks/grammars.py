"""What grammars cost: the output rate of streams that all follow one, beside the same without.

    python tests/benchmarks grammars --model FILE.gguf

The model needs a tokenizer. All requests sample as many tokens: the grammars do not end before.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from benchmarks.common import add_numbers, alternate, print_rates
from tpengine import SamplingParams
from tpengine.bench.harness import report_head
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "pattern": "^[a-z.]{3,20}@[a-z]{3,12}\\.(com|org)$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "roles": {"type": "array", "items": {"enum": ["reader", "writer", "admin"]}},
    },
    "required": ["name", "email", "age", "roles"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "without": {},
    "schema": {"structured_outputs": {"json": {"type": "array", "items": _PERSON, "minItems": 99}}},
    "regex": {"structured_outputs": {"regex": "([A-Z][a-z]{1,11}[ ,.]){999,}"}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        streams=(32, "requests at a time, each with its own matcher"),
        output_tokens=(128, "of a request"),
        rounds=(7, "of runs of each kind, in turn"),
        temperature=(1.0, "of all requests"),
    )
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    settings = replace(EngineArgs.from_cli_args(args), disable_log_stats=True)
    print(report_head(settings, {"work": f"{args.streams} x {args.output_tokens} tokens"}))
    with LLMEngine.from_engine_args(settings) as engine:
        rates = alternate(
            list(KINDS), args.rounds, lambda name, _: _rate(engine, args, KINDS[name]), warm_ups=1
        )
    print_rates(rates, "without")
    return 0


def _rate(engine: LLMEngine, args: argparse.Namespace, constraint: dict[str, Any]) -> float:
    """Output tokens/s of all streams at once."""
    start = time.perf_counter()
    for number in range(args.streams):
        params = SamplingParams(
            temperature=args.temperature,
            seed=number,
            max_tokens=args.output_tokens,
            ignore_eos=True,
            **constraint,
        )
        engine.add_request(str(number), f"List number {number}: ", params)
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
    assert num_tokens == args.streams * args.output_tokens
    return num_tokens / (time.perf_counter() - start)
