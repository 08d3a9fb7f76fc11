"""The forms that a linear layer's weight can have after loading: packed in 16 or 32 bits, in groups
of 4 or 8 bits, or parts of different forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from tpengine.layers.weights import Weights
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import cpu_isa
from tpengine.ops.linear import pack_linear_weight, packed_linear
from tpengine.ops.linear_reference import LINEAR_PANEL
from tpengine.ops.quantized import (
    QuantizedFormat,
    QuantizedWeight,
    per_output,
    quantize_weight,
    quantized_embedding,
    quantized_linear,
)

PACKED_ISAS = {
    torch.float32: ("avx512", "avx512bf16"),
    torch.bfloat16: ("avx512bf16",),
}
"""Instruction sets on which the packed kernels are faster than torch's, by dtype."""

_INT4 = QuantizedFormat(4, 32)


class LinearForm(Protocol):
    """A weight `[out_features, in_features]` as a product reads it."""

    @property
    def nbytes(self) -> int: ...

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Numbers of the model's dtype, see `ops.linear.pack_linear_weight`."""

    packed: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
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

    def look_up(self, token_ids: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Returns the rows `token_ids`, int32 `[num_tokens]`, times `scale`."""
        out = token_ids.new_empty(len(token_ids), self.weight.in_features, dtype=dtype)
        quantized_embedding(out, self.weight, token_ids, scale)
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)


@dataclass(frozen=True, slots=True)
class PlainForm:
    """A part in the model's dtype where torch's own product is faster than a packed one."""

    weight: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        out.copy_(F.linear(x, self.weight, bias))


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


def join(first: LinearForm, second: LinearForm) -> QuantizedForm | None:
    """Returns two neighbouring parts as one; None: their formats or their orders differ, or the
    second does not begin with a panel."""
    if not isinstance(first, QuantizedForm) or not isinstance(second, QuantizedForm):
        return None
    one, other = first.weight, second.weight
    if one.format != other.format or one.out_features % LINEAR_PANEL:
        return None
    if not _are_equal(first.order, second.order):
        return None
    outputs = one.out_features + other.out_features
    packed = torch.cat([one.packed, other.packed])
    return replace(first, weight=replace(one, packed=packed, out_features=outputs))


def _are_equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def into_arena(form: LinearForm, arena: HugePageArena) -> LinearForm:
    """Moves a quantised weight into the memory that a CPU reads fastest."""
    if not isinstance(form, QuantizedForm):
        return form
    packed = form.weight.packed
    packed = arena.empty(packed.nbytes, torch.uint8).copy_(packed)
    return replace(form, weight=replace(form.weight, packed=packed))


def quantized_form(weight: torch.Tensor, weights: Weights) -> QuantizedForm | None:
    """Returns a linear layer's weight in `weights.quantization`; None if that is None."""
    if weights.quantization is None:
        return None
    form = _INT4 if weights.quantization == "int4" else per_output(weight.shape[1])
    return QuantizedForm(quantize_weight(weight, form, weights.arena))


def quantized_vocabulary(weight: torch.Tensor, weights: Weights) -> QuantizedForm | None:
    """Returns an embedding table or output head in 8 bits, whatever the quantization is: in 4 they
    would lose more than any other layer. None without a quantization."""
    if weights.quantization is None:
        return None
    return QuantizedForm(quantize_weight(weight, per_output(weight.shape[1]), weights.arena))


def packed_form(weight: torch.Tensor, weights: Weights) -> PackedForm | None:
    """Returns a weight packed; None where torch's own product is faster."""
    isas = PACKED_ISAS.get(weight.dtype, ())
    if weight.device.type != "cpu" or cpu_isa() not in isas or weight.shape[1] % 2:
        return None
    return PackedForm(pack_linear_weight(weight.contiguous(), weights.arena))
