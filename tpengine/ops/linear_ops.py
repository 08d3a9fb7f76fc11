"""Linear layers with weights in the order in which a CPU's multiply-add instructions read them."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.linear_reference import LINEAR_PANEL

_pack_linear_weight = torch.ops.tpengine.pack_linear_weight.default
_packed_linear = torch.ops.tpengine.packed_linear.default


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
