"""The forms that a linear layer's weight can have after loading: packed in 16 or 32 bits, or in
groups of 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tpengine.layers import gpu_quantized
from tpengine.layers.weights import Weights
from tpengine.ops.library import cpu_isa
from tpengine.ops.linear import pack_linear_weight, packed_linear
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
    """Groups of 4 or 8 bits, see `ops.quantized`."""

    weight: QuantizedWeight

    @property
    def nbytes(self) -> int:
        return self.weight.packed.nbytes

    def multiply(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Writes `x W^T + bias` into `out`."""
        quantized_linear(out, x, self.weight, bias)

    def look_up(self, token_ids: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Returns the rows `token_ids`, int32 `[num_tokens]`, times `scale`."""
        out = token_ids.new_empty(len(token_ids), self.weight.in_features, dtype=dtype)
        quantized_embedding(out, self.weight, token_ids, scale)
        return out


def quantized_form(weight: torch.Tensor, weights: Weights) -> LinearForm | None:
    """Returns a linear layer's weight in `weights.quantization`; None if that is None."""
    if weights.quantization is None:
        return None
    form = _INT4 if weights.quantization == "int4" else per_output(weight.shape[1])
    if gpu_quantized.is_on_gpu(weights):
        return gpu_quantized.gpu_quantized_form(weight, form, weights)
    return QuantizedForm(quantize_weight(weight, form, weights.arena))


def quantized_vocabulary(weight: torch.Tensor, weights: Weights) -> QuantizedForm | None:
    """Returns an embedding table or output head in 8 bits, whatever the quantization is: in 4 they
    would lose more than any other layer. None without a quantization, and on a GPU, where both stay
    in 16 bits."""
    if weights.quantization is None or gpu_quantized.is_on_gpu(weights):
        return None
    return QuantizedForm(quantize_weight(weight, per_output(weight.shape[1]), weights.arena))


def packed_form(weight: torch.Tensor, weights: Weights) -> PackedForm | None:
    """Returns a weight packed; None where torch's own product is faster."""
    isas = PACKED_ISAS.get(weight.dtype, ())
    if weight.device.type != "cpu" or cpu_isa() not in isas or weight.shape[1] % 2:
        return None
    return PackedForm(pack_linear_weight(weight.contiguous(), weights.arena))
