"""Linear layers with weights in the order in which a CPU's multiply-add instructions read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.linear_reference import LINEAR_PANEL

_pack_linear_weight = torch.ops.tpengine.pack_linear_weight.default
_packed_linear = torch.ops.tpengine.packed_linear.default
_int8_linear = torch.ops.tpengine.int8_linear.default


def pack_linear_weight(weight: Tensor, arena: HugePageArena | None = None) -> Tensor:
    """Packs a weight into panels of 32 outputs, `[panels, in_features / p, 32, p]` as a vector.

    p is 2 for bfloat16 (pairs of inputs, as the dot-product instruction reads them) and 1 for
    float32; outputs beyond the last are zeros.

    Args:
        weight: `[out_features, in_features]`, float32 or bfloat16, contiguous; in bfloat16
            `in_features` must be even.
        arena: memory for the result; None: torch allocates it.

    Raises:
        RuntimeError: dtype, shape or strides do not fit.
    """
    outputs, inputs = weight.shape
    count = -(-outputs // LINEAR_PANEL) * LINEAR_PANEL * inputs
    packed = weight.new_empty(count) if arena is None else arena.empty(count, weight.dtype)
    _pack_linear_weight(packed, weight)
    return packed


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """`out = x W^T + bias`, accumulated in float32. A row's result does not depend on other rows.

    Args:
        out: `[num_rows, out_features]`, float32 or bfloat16; written.
        x: `[num_rows, in_features]`, same dtype.
        packed: from `pack_linear_weight`.
        bias: `[out_features]`, same dtype, or None.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _packed_linear(out, x, packed, bias)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight in 8 bits: `weight[n, k]` is about `scales[n] * q[n, k]`, |q| <= 127.

    Attributes:
        packed: int8, q as `[panels, in_features / 4, 32, 4]`, zeros beyond the last output.
        scales: float32 `[out_features]`.
        offsets: int32 `[out_features]`, -128 times the sum of q over the inputs. Kernels that add
            128 to their inputs, to make them unsigned, start their sums from it.
    """

    packed: Tensor
    scales: Tensor
    offsets: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.packed.nbytes + self.scales.nbytes + self.offsets.nbytes


def quantize_weight(weight: Tensor, arena: HugePageArena | None = None) -> Int8Weight:
    """Rounds each output's weights to 8 bits by their largest magnitude ("per channel").

    Args:
        weight: `[out_features, in_features]`, any float dtype, `in_features` a multiple of 4.
        arena: memory for the packed weight; None: torch allocates it.
    """
    outputs, inputs = weight.shape
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127.0
    q = (wide / scales.clamp(min=1e-30).unsqueeze(1)).round().to(torch.int8)
    panels = -(-outputs // LINEAR_PANEL)
    padded = q.new_zeros(panels * LINEAR_PANEL, inputs)
    padded[:outputs] = q
    tiles = padded.view(panels, LINEAR_PANEL, inputs // 4, 4).transpose(1, 2)
    packed = torch.empty_like(padded) if arena is None else arena.empty(padded.numel(), torch.int8)
    packed.view(tiles.shape).copy_(tiles)
    return Int8Weight(packed.view(-1), scales, -128 * q.sum(dim=1, dtype=torch.int32))


def int8_linear(out: Tensor, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> None:
    """`out = x W^T + bias` in 8 bits.

    Each row of x is quantised by its largest magnitude, and sums are exact integers. A row's result
    does not depend on other rows.

    Args:
        out: `[num_rows, out_features]`, float32 or bfloat16; written.
        x: `[num_rows, in_features]`, same dtype.
        bias: `[out_features]`, same dtype, or None.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _int8_linear(out, x, weight.packed, weight.scales, weight.offsets, bias)
