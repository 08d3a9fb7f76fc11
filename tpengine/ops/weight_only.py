"""Weights in groups of 4 or 8 bits beside activations in 16 bits (W4A16, W8A16), as a GPU has them.

On a CPU see `ops.quantized`, which rounds activations too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpengine.ops import weight_only_reference
from tpengine.ops.library import op
from tpengine.ops.quantized_ops import QuantizedFormat
from tpengine.ops.quantized_reference import round_to_groups
from tpengine.ops.weight_only_reference import GPU_PANEL, GPU_STEP, pack_panels, packed_bytes

_weight_only_linear = op(weight_only_reference.weight_only_linear, "out")
_dequantize_weight = op(weight_only_reference.dequantize_weight, "out")

_PIECE = 1 << 25
"""Weights that are rounded and packed at once: what this takes besides the result is bounded."""


@dataclass(frozen=True, slots=True)
class GpuQuantizedWeight:
    """A packed weight `[out_features, in_features]`.

    Attributes:
        packed: uint8; csrc/cuda/quantized/packed_weight.cuh describes the layout.
    """

    packed: Tensor
    format: QuantizedFormat
    out_features: int
    in_features: int

    @property
    def padded_inputs(self) -> int:
        """Columns of a dequantised weight."""
        return -(-self.in_features // GPU_STEP) * GPU_STEP


def quantize_for_gpu(weight: Tensor, form: QuantizedFormat) -> GpuQuantizedWeight:
    """Rounds a weight to groups without offsets as `ops.quantized_ops.quantize_weight_into` does,
    and packs it, on its device.

    Args:
        weight: `[out_features, in_features]`, of any float type.
    """
    (outputs, inputs), bits, size = weight.shape, form.bits, form.group_size
    count = packed_bytes(outputs, inputs, *form)
    packed = torch.empty(count, dtype=torch.uint8, device=weight.device)
    result = GpuQuantizedWeight(packed, form, outputs, inputs)
    rows = max(1, _PIECE // result.padded_inputs // GPU_PANEL) * GPU_PANEL
    for first in range(0, outputs, rows):
        q, scales = round_to_groups(weight[first : first + rows].float(), bits, size)
        pack_panels(packed, first, outputs, q[:, :inputs], scales, None, bits)
    return result


def weight_only_linear(
    out: Tensor, x: Tensor, weight: GpuQuantizedWeight, bias: Tensor | None
) -> None:
    """`out = x W^T + bias` with W as it is stored, without rounding to 16 bits; sums in float32.

    Reads the weight once for each 16 rows. A row's result does not depend on other rows.

    Args:
        out: `[num_rows, out_features]`, float16 or bfloat16; written.
        x: `[num_rows, in_features]`, same dtype; rows of a multiple of 8 inputs, aligned to 16
            bytes.
        bias: `[out_features]`, same dtype, or None.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _weight_only_linear(out, x, weight.packed, bias, *weight.format)


def dequantize_weight(out: Tensor, weight: GpuQuantizedWeight, first_output: int) -> None:
    """Writes outputs of the weight as floats, each rounded once.

    Args:
        out: `[num_outputs, padded_inputs]`, a multiple of 32 outputs; written. What lies beyond the
            weight's outputs and inputs has no meaning.
        first_output: a multiple of 32.

    Raises:
        RuntimeError: dtypes or shapes do not fit, or the weight has no such outputs.
    """
    _dequantize_weight(out, weight.packed, first_output, weight.out_features, *weight.format)
