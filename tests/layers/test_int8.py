"""Models with 8-bit linear layers, against transformers with the same rounding of weights and
inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bare_model import BareModel, logits_in_transformers
from support.engines import generate, greedy, ids, make_engine, open_llm
from support.models import ModelShop
from support.ranks import run_ranks
from support.step_log import log_steps
from support.tiny_llama import TinyLlama
from torch import nn
from transformers import AutoModelForCausalLM

from tpengine.errors import ConfigError

SPECS = {
    "tied": TinyLlama(64, 4, 2, tied=True),
    "untied": TinyLlama(64, 4, 4, hidden_size=96),
    "biases": TinyLlama(64, 8, 2, bias=True),
}
SPLIT_OVER_INPUTS = ("o_proj", "down_proj")
BOUND = 0.02
"""Largest `difference` from the rounded model. It is above 0, because sums in another order may
round a value halfway between two steps to the other step."""


def round_rows(values: torch.Tensor) -> torch.Tensor:
    """Rounds each row to steps of its largest magnitude / 127."""
    scales = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scales).round() * scales


def round_parts(values: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Rounds each of `count` equal parts of a row like `rounded`."""
    return torch.cat([round_rows(part) for part in values.chunk(num_parts, dim=-1)], dim=-1)


def rounded_model(folder: Path, tp_size: int = 1) -> Any:
    """The model in transformers, all linear layers but the head with rounded weights and inputs.

    Ranks that divide a layer's inputs round each its own part.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parts = tp_size if name.endswith(SPLIT_OVER_INPUTS) else 1
            layer.weight.data = round_parts(layer.weight.data, parts)
            layer.register_forward_pre_hook(rounding_hook(parts))
    return model


def rounding_hook(num_parts: int) -> Callable[[nn.Module, tuple[torch.Tensor]], Any]:
    return lambda module, inputs: (round_parts(inputs[0], num_parts),)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square difference, divided by the spread of the expected logits."""
    return float((logits - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("name", list(SPECS))
def test_logits_are_those_of_the_rounded_model(models: ModelShop, name: str) -> None:
    folder = models.folder(SPECS[name])
    with torch.inference_mode():
        found = BareModel(folder, quantization="int8").logits()
    to_rounded = difference(found, logits_in_transformers(rounded_model(folder)))
    to_exact = difference(found, logits_in_transformers(models.oracle(folder).model))
    assert to_rounded < BOUND
    assert to_exact > 2 * BOUND, "nothing was rounded"
    assert to_exact < 0.2, "8 bits cost more than they should"


@pytest.mark.parametrize("name", list(SPECS))
def test_two_ranks(models: ModelShop, name: str) -> None:
    folder = models.folder(SPECS[name])
    answers, _ = run_ranks(2, lambda parallel: BareModel(folder, parallel, "int8").logits())
    expected = logits_in_transformers(rounded_model(folder, tp_size=2))
    to_rounded = difference(answers[0], expected)
    to_one_rank = difference(answers[0], logits_in_transformers(rounded_model(folder)))
    assert to_rounded < BOUND
    assert to_one_rank > 2 * to_rounded, "each rank rounds its own part of the inputs"


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_output_head_is_not_rounded(models: ModelShop, name: str) -> None:
    folder = models.folder(SPECS[name])
    hidden = torch.randn(7, SPECS[name].hidden_size, generator=torch.Generator().manual_seed(0))
    head = models.oracle(folder).model.lm_head.weight.detach()
    with torch.inference_mode():
        model = BareModel(folder, quantization="int8").model
        found, expected = model.compute_logits(hidden), hidden @ head.t()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert difference(hidden @ round_rows(head).t(), expected) > 1e-3, "the test could not tell"


@pytest.mark.parametrize("name", ["tied", "biases"])
def test_same_tokens_alone_and_in_a_crowd(models: ModelShop, name: str) -> None:
    folder = models.folder(SPECS[name])
    rng = random.Random(4)
    prompts = [
        [rng.randrange(3, 512) for _ in range(length)]
        for length in (1, 5, 16, 33, 64, 121, 200) * 4
    ]
    with (
        log_steps() as log,
        open_llm(
            folder, quantization="int8", max_num_batched_tokens=96, enable_prefix_caching=False
        ) as llm,
    ):
        together = ids(generate(llm, prompts, greedy(24)))
        assert log.max_rows >= 16
        assert log.num_partial_chunks > 0
        alone = [ids(generate(llm, [prompt], greedy(24)))[0] for prompt in prompts[:14]]
    assert alone == together[:14]
    with open_llm(folder) as llm:
        exact = ids(generate(llm, prompts, greedy(24)))
    assert exact != together, "nothing was rounded"
    num_same = sum(ours[0] == theirs[0] for ours, theirs in zip(together, exact, strict=True))
    assert num_same > 0.7 * len(prompts)


def test_inputs_that_are_no_multiple_of_four(models: ModelShop) -> None:
    with pytest.raises(ConfigError, match=r"int8.*multiple of 4.*190.*leave quantization unset"):
        make_engine(models.folder(TinyLlama(64, 4, 2, intermediate_size=190)), quantization="int8")
