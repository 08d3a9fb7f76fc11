"""The ops of `linear` and `experts` in plain torch, as `reference` has the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR_PANEL = 32
"""Outputs that are adjacent in a packed weight (`kLinearPanel` in csrc)."""


def pack_linear_weight(packed: Tensor, weight: Tensor) -> None:
    """See `ops.linear_ops.pack_linear_weight`."""
    outputs, inputs = weight.shape
    pack = 4 // weight.dtype.itemsize
    panels = -(-outputs // LINEAR_PANEL)
    padded = weight.new_zeros(panels * LINEAR_PANEL, inputs)
    padded[:outputs] = weight
    tiles = padded.view(panels, LINEAR_PANEL, inputs // pack, pack).transpose(1, 2)
    packed.copy_(tiles.reshape(-1))


def _unpack(packed: Tensor, outputs: int, inputs: int, pack: int) -> Tensor:
    """Returns the weight `[outputs, inputs]` whose panels `packed` holds."""
    tiles = packed.view(-1, inputs // pack, LINEAR_PANEL, pack).transpose(1, 2)
    return tiles.reshape(-1, inputs)[:outputs]


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
    pack, inputs, outputs = 4 // x.dtype.itemsize, x.shape[1], out.shape[1]
    weight = _unpack(packed, outputs, inputs, pack)
    result = x.float() @ weight.float().t()
    out.copy_(result if bias is None else result + bias.float())


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
    weights, ids = logits.float().softmax(-1).topk(expert_ids.shape[1])
    expert_ids.copy_(ids)
    expert_weights.copy_(weights / weights.sum(-1, keepdim=True) if normalize else weights)


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
    # Every expert computes every token, so that no shape depends on the choices: CUDA graphs can
    # hold it.
    hidden, pack = x.shape[1], 4 // x.dtype.itemsize
    if down.dim() == 2:
        inner = down.shape[1] // (-(-hidden // LINEAR_PANEL) * LINEAR_PANEL)
        gate_up = torch.stack([_unpack(panels, 2 * inner, hidden, pack) for panels in gate_up])
        down = torch.stack([_unpack(panels, hidden, inner, pack) for panels in down])
    x = x.contiguous()  # oneDNN's product for AMX reads beyond the end of a row, which may be NaN
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(down)):
        gate, up = F.linear(x, gate_up[expert]).chunk(2, dim=-1)
        answer = F.linear(F.silu(gate) * up, down[expert]).float()
        is_chosen = expert_ids == expert
        weight = expert_weights.where(is_chosen, 0.0).sum(-1, keepdim=True)
        total += (answer * weight).where(is_chosen.any(-1, keepdim=True), 0.0)
    out.copy_(total)
