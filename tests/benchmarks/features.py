"""What adapters and grammars cost: the output rate of streams with them, beside the same without.

    python tests/benchmarks features --model FILE.gguf --only schema,regex
    python tests/benchmarks features --shape llama-124m --only adapters

The adapters are random, and the streams share them. Grammars need a model with a tokenizer. All
requests sample as many tokens: the grammars do not end before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import add_numbers, alternate, print_rates, random_prompt
from tpengine import LoRARequest, SamplingParams
from tpengine.bench.harness import ModelOptions, model_args, report_head
from tpengine.checkpoint.adapter_files import CONFIG_FILE, TENSOR_FILE
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine_args import EngineArgs
from tpengine.executor.local_executor import LocalExecutor
from tpengine.layers.adapter_parts import Targets

_RANK = 16
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
_GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": {"type": "array", "items": _PERSON, "minItems": 99}},
    "regex": {"regex": "([A-Z][a-z]{1,11}[ ,.]){999,}"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options and the engine's."""
    add_numbers(
        parser,
        streams=(32, "requests at a time"),
        prompt_tokens=(32, "of a request"),
        output_tokens=(64, "of a request"),
        adapters=(8, f"of rank {_RANK}, all in slots"),
        rounds=(7, "of runs of each kind, in turn"),
        temperature=(1.0, "of all requests"),
    )
    kinds = "what to measure, separated by commas (default: %(default)s)"
    parser.add_argument("--only", default="adapters,schema,regex", help=kinds)
    ModelOptions.add_cli_args(parser)
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints the report."""
    kinds = args.only.split(",")
    with model_args(args) as settings, ExitStack() as stack:
        settings = replace(settings, disable_log_stats=True, enable_prefix_caching=False)
        work = f"{args.streams} x {args.output_tokens} tokens"
        print(report_head(settings, {"work": work}), flush=True)
        plain = stack.enter_context(LLMEngine.from_engine_args(settings))
        with_adapters: tuple[LLMEngine, list[LoRARequest]] = plain, []
        if "adapters" in kinds:
            with_adapters = stack.enter_context(_engine_with_adapters(settings, args.adapters))

        def rate(kind: str, number: int) -> float:
            if kind == "adapters":
                return _rate(*with_adapters, args, number, None)
            return _rate(plain, [None], args, number, _GRAMMARS.get(kind))

        rates = alternate(["without", *kinds], args.rounds, rate, warm_ups=1)
    print_rates(rates, "without")
    return 0


@contextmanager
def _engine_with_adapters(
    settings: EngineArgs, count: int
) -> Iterator[tuple[LLMEngine, list[LoRARequest]]]:
    """An engine and random adapters of all its layers, in bfloat16 in PEFT's files."""
    settings = replace(settings, enable_lora=True, max_loras=count, max_lora_rank=_RANK)
    config = settings.create_engine_config("cpu")
    executor = LocalExecutor(config)
    with (
        LLMEngine(config, executor, log_stats=False) as engine,
        tempfile.TemporaryDirectory() as root,
    ):
        targets: Targets = executor._run_workers("adapter_targets")[0]
        modules = sorted({name.rsplit(".", 1)[1] for name in targets})
        fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 16, "target_modules": modules}
        adapters = []
        for number in range(count):
            folder = Path(root) / str(number)
            folder.mkdir()
            (folder / CONFIG_FILE).write_text(json.dumps(fields))
            tensors = {
                f"base_model.model.{name}.lora_{part}.weight": 0.01 * torch.randn(shape).bfloat16()
                for name, (outputs, inputs) in targets.items()
                for part, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK)))
            }
            save_file(tensors, folder / TENSOR_FILE)
            adapters.append(LoRARequest(str(number), number + 1, str(folder)))
        yield engine, adapters


def _rate(
    engine: LLMEngine,
    adapters: Sequence[LoRARequest | None],
    args: argparse.Namespace,
    seed: int,
    grammar: dict[str, Any] | None,
) -> float:
    """Output tokens/s of all streams at once."""
    prompts = [random_prompt(engine, args.prompt_tokens, seed + i) for i in range(args.streams)]
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=args.temperature,
            seed=number,
            max_tokens=args.output_tokens,
            ignore_eos=True,
            structured_outputs=grammar,
        )
        adapter = adapters[number % len(adapters)]
        engine.add_request(str(number), None, params, prompt_token_ids=prompt, lora_request=adapter)
    num_tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
    assert num_tokens == args.streams * args.output_tokens
    return num_tokens / (time.perf_counter() - start)
