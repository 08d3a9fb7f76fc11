"""Linear layers over weights that are packed for the CPU's multiply-add instructions."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)
from tpengine.ops.reference import LINEAR_PANEL

_pack_linear_weight = torch.ops.tpengine.pack_linear_weight.default
_packed_linear = torch.ops.tpengine.packed_linear.default


def pack_linear_weight(weight: Tensor) -> Tensor:
    """Packs a weight into panels of 32 outputs, `[panels, in_features / p, 32, p]` as a vector.

    p is 2 for bfloat16 (neighbouring inputs side by side, as its dot-product instruction reads
    them) and 1 for float32; outputs beyond the last are zeros.

    Args:
        weight: `[out_features, in_features]`, float32 or bfloat16, contiguous; in bfloat16
            `in_features` must be even.

    Raises:
        RuntimeError: dtype, shape or strides do not fit.
    """
    outputs, inputs = weight.shape
    packed = weight.new_empty(-(-outputs // LINEAR_PANEL) * LINEAR_PANEL * inputs)
    _pack_linear_weight(packed, weight)
    return packed


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """`out = x W^T + bias`, accumulated in float32. A row's result does not depend on the others.

    Args:
        out: `[num_rows, out_features]`; written.
        x: `[num_rows, in_features]`.
        packed: from `pack_linear_weight`.
        bias: `[out_features]`, or None.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _packed_linear(out, x, packed, bias)
