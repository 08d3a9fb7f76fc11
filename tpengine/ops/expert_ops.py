"""Mixtures of experts: which experts a token goes to, and all their products in one call."""

from __future__ import annotations

from torch import Tensor

from tpengine.ops import linear_reference
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.library import op
from tpengine.ops.linear_ops import pack_into
from tpengine.ops.linear_reference import LINEAR_PANEL

top_experts = op(linear_reference.top_experts, "expert_ids", "expert_weights")
expert_mlp = op(linear_reference.expert_mlp, "out")


def pack_experts(weights: Tensor, arena: HugePageArena) -> Tensor:
    """Packs each expert's weight as `pack_linear_weight` does; `[num_experts, size]`.

    Args:
        weights: `[num_experts, out_features, in_features]`, float32 or bfloat16, contiguous; in
            bfloat16 `in_features` must be even.
        arena: memory for the result.

    Raises:
        RuntimeError: dtype, shape or strides do not fit.
    """
    num_experts, outputs, inputs = weights.shape
    size = -(-outputs // LINEAR_PANEL) * LINEAR_PANEL * inputs
    packed = arena.empty(num_experts * size, weights.dtype).view(num_experts, size)
    for own_packed, weight in zip(packed, weights, strict=True):
        pack_into(own_packed, weight)
    return packed
