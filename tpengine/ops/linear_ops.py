"""Linear layers with weights in the order in which a CPU's multiply-add instructions read them."""

from __future__ import annotations

from torch import Tensor

from tpengine.ops import linear_reference
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import op
from tpengine.ops.linear_reference import LINEAR_PANEL

pack_into = op(linear_reference.pack_linear_weight, "packed")
packed_linear = op(linear_reference.packed_linear, "out")


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
    pack_into(packed, weight)
    return packed
