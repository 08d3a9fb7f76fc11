"""Models with weights of 4 and 8 bits, against transformers with the same rounding of weights and
inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bare_model import BareModel, logits_in_transformers
from support.models import ModelShop
from support.ranks import run_ranks
from support.rounded_rows import round_rows, rounded_weight
from support.tiny_llama import TinyLlama
from torch import nn
from transformers import AutoModelForCausalLM

from tpengine.layers.gpu_quantized import KERNEL_ROWS, GpuQuantizedForm
from tpengine.ops import weight_only
from tpengine.ops.quantized_ops import QuantizedFormat, per_output

SPECS = {
    "tied": TinyLlama(64, 4, 2, tied=True),
    "untied": TinyLlama(64, 4, 4, hidden_size=96),
    "biases": TinyLlama(64, 8, 2, bias=True),
    "odd": TinyLlama(64, 4, 2, intermediate_size=190),
}
KINDS = ["int8", "int4"]
SIZES = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Inputs with one scale."""
CASES = [(name, kind) for name in SPECS for kind in KINDS]
CASES += [("untied", "int4-g64"), ("biases", "int4-g128")]
SPLIT_OVER_INPUTS = ("o_proj", "down_proj")
BOUND = 0.02
"""Largest `difference` from the rounded model. It is above 0, because sums in another order may
round a value halfway between two steps to the other step."""


def round_weight(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A part of a weight as it is stored (`tests/ops` hold that against the original)."""
    form = per_output(weight.shape[1]) if kind == "int8" else QuantizedFormat(4, SIZES[kind])
    return rounded_weight(weight, form)


def by_parts(
    values: torch.Tensor, num_parts: int, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Rounds each of `num_parts` equal parts of a row by `one`."""
    return torch.cat([convert(part) for part in values.chunk(num_parts, dim=-1)], dim=-1)


def rounded_model(folder: Path, kind: str, tp_size: int = 1, is_gpu: bool = False) -> Any:
    """The model in transformers, with rounded weights and inputs.

    Embedding and head have 8 bits. Ranks that divide a layer's inputs round each its own part. The
    form of a GPU leaves embedding, head and inputs as they are.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, layer in model.named_modules():
        is_head = name == "lm_head" or isinstance(layer, nn.Embedding)
        if not isinstance(layer, nn.Linear | nn.Embedding) or (is_gpu and is_head):
            continue
        parts = tp_size if name.endswith(SPLIT_OVER_INPUTS) else 1
        bits = "int8" if is_head else kind
        rounded = by_parts(layer.weight.data, parts, partial(round_weight, kind=bits))
        layer.weight = nn.Parameter(rounded, requires_grad=False)
        if isinstance(layer, nn.Linear) and not is_gpu:
            layer.register_forward_pre_hook(rounding_hook(parts))
    return model


def rounding_hook(num_parts: int) -> Callable[[nn.Module, tuple[torch.Tensor]], Any]:
    return lambda module, inputs: (by_parts(inputs[0], num_parts, round_rows),)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square difference, divided by the spread of the expected logits."""
    return float((logits - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_the_rounded_model(models: ModelShop, name: str, kind: str) -> None:
    folder = models.folder(SPECS[name])
    with torch.inference_mode():
        logits = BareModel(folder, quantization=kind).logits()
    to_rounded = difference(logits, logits_in_transformers(rounded_model(folder, kind)))
    to_exact = difference(logits, logits_in_transformers(models.oracle(folder).model))
    assert to_rounded < BOUND
    assert to_exact > 2 * BOUND, "nothing was rounded"
    assert to_exact < (0.2 if kind == "int8" else 0.8), "the bits cost more than they should"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_two_ranks(models: ModelShop, name: str, kind: str) -> None:
    """A rank's part of the inputs of "odd" and "biases" is no whole number of groups."""
    folder = models.folder(SPECS[name])
    answers, _ = run_ranks(2, lambda parallel: BareModel(folder, parallel, kind).logits())
    if name == "odd":  # its parts are 96 and 94
        expected = BareModel(folder, quantization=kind).logits()
        assert difference(answers[0], expected) < 0.1
        return
    expected = logits_in_transformers(rounded_model(folder, kind, tp_size=2))
    to_rounded = difference(answers[0], expected)
    to_one_rank = difference(answers[0], logits_in_transformers(rounded_model(folder, kind)))
    assert to_rounded < BOUND
    assert to_one_rank > 2 * to_rounded, "each rank rounds its own part of the inputs"


@pytest.mark.parametrize("kind", [*KINDS, "int4-g128"])
@pytest.mark.parametrize("name", ["tied", "odd"])
def test_the_form_of_a_gpu_rounds_weights_alone(
    models: ModelShop, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.layers.gpu_quantized.is_on_gpu", lambda weights: True)
    folder = models.folder(SPECS[name])
    with torch.inference_mode():
        model = BareModel(folder, quantization=kind)
        logits = model.logits()
    expected = logits_in_transformers(rounded_model(folder, kind, is_gpu=True))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert model.model.embed_tokens.form is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_of_rows_in_the_form_of_a_gpu(dtype: torch.dtype) -> None:
    """More rows than the kernel takes are multiplied by pieces of the dequantised weight."""
    gen = torch.Generator().manual_seed(3)
    for inputs, outputs in ((190, 40), (192, 200)):
        weight = torch.randn(outputs, inputs, generator=gen).to(dtype)
        expected = round_weight(weight.float(), "int4").double()
        packed = weight_only.quantize_for_gpu(weight, QuantizedFormat(4, 32))
        workspace = torch.empty(64 * 192 * dtype.itemsize, dtype=torch.uint8)  # of 64 outputs
        form = GpuQuantizedForm(packed, workspace)
        for rows in (1, KERNEL_ROWS, KERNEL_ROWS + 1, 70):
            x = torch.randn(rows, inputs + 8, generator=gen).to(dtype)[:, 8:]
            for bias in (None, torch.randn(outputs, generator=gen).to(dtype)):
                out = torch.full((rows, outputs), float("nan"), dtype=dtype)
                form.multiply(out, x, bias)
                exact = x.double() @ expected.t() + (0.0 if bias is None else bias.double())
                error = float((out.double() - exact).norm() / exact.norm())
                assert error < (1e-5 if dtype == torch.float32 else 5e-3)
