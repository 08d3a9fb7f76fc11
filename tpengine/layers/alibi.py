"""Attention with linear biases (ALiBi, https://arxiv.org/abs/2108.12409)."""

from __future__ import annotations

import torch

from tpengine.layers.weights import Weights


def alibi_slopes(total_num_heads: int) -> list[float]:
    """The bias per token of distance of every head.

    For a power of two the geometric sequence of the paper; else that of the next lower power, and
    for the remaining heads every other element of the next higher one's.
    """
    power = 1 << (total_num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(total_num_heads - power)]
    return slopes + between


def rank_alibi_slopes(weights: Weights, total_num_heads: int) -> torch.Tensor:
    """This rank's slopes, float32 `[num_heads]`."""
    num_heads = weights.parallel.divide(total_num_heads, "attention heads")
    start = weights.parallel.tp_rank * num_heads
    slopes = alibi_slopes(total_num_heads)[start : start + num_heads]
    return weights.table(torch.tensor(slopes, dtype=torch.float32, device=weights.device))
