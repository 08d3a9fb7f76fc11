"""The forms that a linear layer's weight can have after loading: packed in 16 or 32 bits, in groups
of 4 or 8 bits, or parts of different forms.

Where a new quantised form is added:
    how its numbers lie in memory, and its ops: `QuantizedFormat` of `ops/quantized_ops.py`
        (CPU: `csrc/cpu/isa/quantized.cpp`; GPU: `ops/weight_only.py`, `csrc/cuda/quantized`).
    how a layer holds it: a form here, or in `gpu_quantized.py`. Experts: `moe.py`.
    how it is read from a file: a `QuantizedSource` of `weights.py`, made in
        `checkpoint/quantized_sources.py`, or for GGUF in `checkpoint/gguf_groups.py`; which files
        have it: `checkpoint/quantization_config.py`.
    how a user asks for it if weights have 16 bits: `QUANTIZATIONS` of `config.py`, and
        `rounded_format` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from tpengine.layers import gpu_quantized
from tpengine.layers.weights import Weights
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import has_cpu_kernels
from tpengine.ops.linear_ops import pack_linear_weight, packed_linear
from tpengine.ops.linear_reference import LINEAR_PANEL
from tpengine.ops.quantized_ops import (
    QuantizedFormat,
    QuantizedWeight,
    per_output,
    quantized_embedding,
    quantized_linear,
)

_GROUP_SIZES = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
"""Inputs with one scale, by quantization."""


class LinearForm(Protocol):
    """A weight `[out_features, in_features]` as a product reads it."""

    @property
    def nbytes(self) -> int: ...

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Numbers of the model's dtype on a CPU, see `ops.linear_ops.pack_linear_weight`.

    Attributes:
        padding: zeros after the inputs of each row: 1 if there is an odd number of bfloat16.
    """

    packed: torch.Tensor
    padding: int = 0

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        x = F.pad(x, (0, self.padding)) if self.padding else x
        packed_linear(out, x, self.packed, bias)


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """Groups of 4 or 8 bits, see `ops.quantized`.

    Attributes:
        order: int64 `[in_features]`, the input of each column (GPTQ's `desc_act`); None: columns
            are in the order of the inputs.
    """

    weight: QuantizedWeight
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.packed.nbytes + (0 if self.order is None else self.order.nbytes)

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        x = x if self.order is None else x.index_select(1, self.order)
        quantized_linear(out, x, self.weight, bias)

    def look_up(
        self, token_ids: torch.Tensor, dtype: torch.dtype, scale: float, first: int | None
    ) -> torch.Tensor:
        """Returns the rows `token_ids`, int32 `[num_tokens]`, times `scale`; `first`: see
        `reference.embedding`."""
        out = token_ids.new_empty(len(token_ids), self.weight.in_features, dtype=dtype)
        quantized_embedding(out, self.weight, token_ids, scale, first)
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)


@dataclass(frozen=True, slots=True)
class PartsForm:
    """Outputs in several forms: layers that are one product, whose tensors have different types.

    Attributes:
        parts: of each its outputs and its form; together all outputs, in their order.
    """

    parts: tuple[tuple[slice, LinearForm], ...]

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for _, form in self.parts)

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        for outputs, form in self.parts:
            form.multiply(out[:, outputs], x, None if bias is None else bias[outputs])


def can_join(first: QuantizedForm | None, second: QuantizedForm | None) -> bool:
    """Whether two neighbouring parts have one format and one order of inputs, and the second one
    begins with a panel."""
    if first is None or second is None or first.weight.format != second.weight.format:
        return False
    if first.order is None or second.order is None:
        has_one_order = first.order is second.order
    else:
        has_one_order = torch.equal(first.order, second.order)
    return has_one_order and first.weight.out_features % LINEAR_PANEL == 0


def join(forms: Sequence[QuantizedForm], arena: HugePageArena) -> QuantizedForm:
    """Returns neighbouring parts as one weight; in memory from `arena`, unless there are several
    and each lies behind the one before."""
    weights = [form.weight for form in forms]
    vectors = [weight.packed for weight in weights]
    num_bytes = sum(vector.nbytes for vector in vectors)
    if len(vectors) > 1 and all(map(_is_behind, vectors, vectors[1:])):
        packed = vectors[0].as_strided((num_bytes,), (1,))
    else:
        packed = torch.cat(vectors, out=arena.empty(num_bytes, torch.uint8))
    outputs = sum(weight.out_features for weight in weights)
    return replace(forms[0], weight=replace(weights[0], packed=packed, out_features=outputs))


def _is_behind(first: torch.Tensor, second: torch.Tensor) -> bool:
    has_one_storage = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return has_one_storage and first.data_ptr() + first.nbytes == second.data_ptr()


def rounded_format(weights: Weights, in_features: int) -> QuantizedFormat | None:
    """Returns the format of linear layers for `weights.quantization`; None if that is None."""
    if weights.quantization is None:
        return None
    size = _GROUP_SIZES.get(weights.quantization)
    return per_output(in_features) if size is None else QuantizedFormat(4, size)


def vocabulary_format(weights: Weights, in_features: int) -> QuantizedFormat | None:
    """Returns that of embedding tables and output heads: 8 bits, whatever the quantization is. In 4
    they would lose more than any other layer. None on a GPU, where both stay in 16 bits."""
    if weights.quantization is None or gpu_quantized.is_on_gpu(weights):
        return None
    return per_output(in_features)


def packed_form(weight: torch.Tensor, weights: Weights) -> PackedForm | None:
    """Returns a weight packed; None where torch multiplies it: on a GPU, and without compiled
    kernels."""
    if weight.device.type != "cpu" or not has_cpu_kernels():
        return None
    padding = weight.shape[1] % 2 if weight.dtype is torch.bfloat16 else 0
    padded = F.pad(weight, (0, padding)) if padding else weight.contiguous()
    return PackedForm(pack_linear_weight(padded, weights.arena), padding)
