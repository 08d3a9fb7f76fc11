"""Mixtures of experts: which experts a token goes to, and all their products in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)
from tpengine.ops.huge_pages import HugePageArena
from tpengine.ops.linear_reference import LINEAR_PANEL

_top_experts = torch.ops.tpengine.top_experts.default
_pack_linear_weight = torch.ops.tpengine.pack_linear_weight.default
_expert_mlp = torch.ops.tpengine.expert_mlp.default


def top_experts(
    expert_ids: Tensor, expert_weights: Tensor, logits: Tensor, normalize: bool
) -> None:
    """Chooses the likeliest experts of each token, by the softmax of its logits in float32.

    Args:
        expert_ids: int32 `[num_tokens, k]`, written; likeliest first.
        expert_weights: float32 `[num_tokens, k]`, written: their probabilities.
        logits: `[num_tokens, num_experts]`, float32 or bfloat16; rows may be strided.
        normalize: divide a token's weights by their sum.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit.
    """
    _top_experts(expert_ids, expert_weights, logits, normalize)


def expert_mlp(
    out: Tensor,
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
) -> None:
    """Sums the answers of each token's experts, `down(silu(gate(x)) * up(x))`, by their weights.

    On a CPU the tokens are sorted by expert, and the products of all experts share the threads. A
    row's result does not depend on other rows.

    Args:
        out: `[num_tokens, hidden_size]`, float32 or bfloat16; written.
        x: same shape and dtype.
        expert_ids: int32 `[num_tokens, k]`, k at most 64.
        expert_weights: float32 `[num_tokens, k]`.
        gate_up: `[num_experts, 2 * n, hidden_size]`: gates, then factors. On a CPU with compiled
            kernels from `pack_experts`.
        down: `[num_experts, hidden_size, n]`, or the same packed.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit, or an id has no expert.
    """
    _expert_mlp(out, x, expert_ids, expert_weights, gate_up, down)


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
        _pack_linear_weight(own_packed, weight)
    return packed
