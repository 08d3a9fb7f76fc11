"""LoRA adapters of small models, made by PEFT, and PEFT's own answers with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from support import engines
from support.engines import greedy
from support.foretold import foretell
from support.oracle import Answer, Oracle
from tpengine import LLMEngine, LoRARequest, RequestOutput

Job = tuple[str | None, list[int]]
"""The name of an adapter, None: none, and a prompt."""
NUM_TOKENS = 32
"""Of an answer: two blocks."""
ADDED_RANGE = 0.1
"""Standard deviation of A and of B: large enough that an adapter changes nearly every answer."""


def write_adapter(base: Path, folder: Path, seed: int, **config: Any) -> None:
    """Writes a random adapter of a base model as PEFT does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapt(model, seed, **config).save_pretrained(folder)


def adapt(model: Any, seed: int, **config: Any) -> Any:
    """Gives a model a random adapter; returns PEFT's model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **config}
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    size = math.sqrt(parameter.shape[0 if "lora_A" in name else 1] / 8)
                    parameter.normal_(0.0, ADDED_RANGE / size)
    return adapted


class Adapters:
    """Adapters of one base, with their oracles.

    Args:
        configs: of each adapter its fields of `LoraConfig`, by name.
        num_tokens: of PEFT's answers.

    Attributes:
        requests: a `LoRARequest` for each name.
        oracles: PEFT's model for each name; None: the base.
    """

    def __init__(
        self,
        base: Path,
        root: Path,
        configs: Mapping[str, Mapping[str, Any]],
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        self.base = base
        self.requests: dict[str, LoRARequest] = {}
        self.oracles: dict[str | None, Oracle] = {None: Oracle(base, num_tokens)}
        for number, (name, config) in enumerate(configs.items(), start=1):
            folder = root / name
            write_adapter(base, folder, seed=number, **config)
            self.requests[name] = LoRARequest(name, number, str(folder))
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            adapted = PeftModel.from_pretrained(model, folder).eval()
            self.oracles[name] = Oracle(base, num_tokens, adapted)

    def request(self, name: str | None) -> LoRARequest | None:
        """The request for an adapter; None: for none."""
        return None if name is None else self.requests[name]

    def answers(self, jobs: Sequence[Job]) -> list[Answer]:
        """PEFT's answers to prompts, each with its adapter."""
        return [self.oracles[name].answers([prompt])[0] for name, prompt in jobs]

    def jobs(self, names: Sequence[str | None], lengths: Sequence[int], seed: int = 1) -> list[Job]:
        """A prompt of each length for each name. Rounding does not change their answers, but the
        adapter does."""
        chosen: list[Job] = []
        for number, name in enumerate(names):
            own: list[Job] = [
                (name, prompt) for prompt in self.oracles[name].prompts(lengths, seed + number)
            ]
            bare = self.answers([(None, prompt) for _, prompt in own])
            for answer, other in zip(self.answers(own), bare, strict=True):
                assert name is None or answer.token_ids != other.token_ids
            chosen += own
        return chosen


def serve(engine: LLMEngine, adapters: Adapters, jobs: Sequence[Job]) -> list[RequestOutput]:
    """The last outputs of all jobs, which run side by side. An engine that looks ahead drafts from
    the answers of PEFT."""
    names, prompts = zip(*jobs, strict=True)
    if engine.get_scheduler_config().lookahead is not None:
        texts = zip(prompts, adapters.answers(jobs), strict=True)
        foretell(engine, {tuple(prompt): [answer.token_ids] for prompt, answer in texts})
    requests = [adapters.request(name) for name in names]
    return engines.serve(engine, prompts, greedy(NUM_TOKENS), requests)


def assert_peft(adapters: Adapters, jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> None:
    """Makes sure that the ids are those of PEFT."""
    for (name, prompt), answer, output in zip(jobs, adapters.answers(jobs), outputs, strict=True):
        assert output.error is None
        assert output.lora_request == adapters.request(name)
        token_ids = output.outputs[0].token_ids
        assert token_ids == answer.token_ids, f"{name}, a prompt of {len(prompt)} tokens"


def open_engine(base: Path, tp_size: int = 1, **args: Any) -> AbstractContextManager[LLMEngine]:
    """An engine for adapters, in float32 unless told otherwise; ranks are threads."""
    args = {"max_lora_rank": 64, "num_device_blocks_override": 400, "max_model_len": 256, **args}
    args = {"enable_lora": True, "skip_tokenizer_init": True, **args}
    return engines.open_engine(base, tp_size, **args)
