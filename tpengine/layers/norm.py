"""Normalisation layers."""

from __future__ import annotations

import torch

from tpengine.layers.weights import Weights
from tpengine.ops import fused


class RMSNorm:
    """Root-mean-square normalisation (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, weights: Weights, name: str, hidden_size: int, eps: float) -> None:
        self.weight = weights.replicated(f"{name}.weight", hidden_size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]`, normalised."""
        out = torch.empty_like(x)
        fused.rms_norm(out, x, self.weight, self.eps)
        return out

    def add_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x to `residual` in place and returns the normalised sum."""
        out = torch.empty_like(x)
        fused.add_rms_norm(out, x, residual, self.weight, self.eps)
        return out
