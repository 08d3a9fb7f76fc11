"""Normalisation layers."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from tpengine.layers.linear import QKVParallelLinear
from tpengine.layers.weights import Weights, WeightShard
from tpengine.ops import fused_ops as fused


class Norm(Protocol):
    """A normalisation of each token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]` to its normalised values, same shape and dtype."""

    def add_forward(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Adds x to `residual` in place and returns the normalised sum, each
        `[num_tokens, hidden_size]`. None, as in the first layer: adds nothing."""


class NoNorm:
    """Stands where a family has no norm; it returns its argument, not a copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm.forward`."""
        return x

    def add_forward(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """See `Norm.add_forward`."""
        if x is not None:
            fused.accumulate(residual, x)
        return residual


def norm_weight(weights: Weights, name: str, size: int, centered: bool) -> torch.Tensor:
    """Allocates and declares the weight `[size]` of an RMSNorm.

    Args:
        centered: the checkpoint's weight is the distance from 1 (Gemma). `1 + weight` needs more
            digits than bfloat16 has, so it is kept in float32.
    """
    if not centered:
        return weights.replicated(f"{name}.weight", size)
    weight = weights.replicated(f"{name}.weight", size, dtype=torch.float32)

    def finish() -> None:
        weight.copy_(weight.to(weights.dtype)).add_(1.0)  # rounded first, as transformers does

    weights.after_loading(finish)
    return weight


class RMSNorm:
    """Root-mean-square normalisation (https://arxiv.org/abs/1910.07467).

    Args:
        centered: see `norm_weight`.
    """

    def __init__(
        self, weights: Weights, name: str, hidden_size: int, eps: float, centered: bool = False
    ) -> None:
        self.weight = norm_weight(weights, name, hidden_size, centered)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm.forward`."""
        out = torch.empty_like(x)
        fused.rms_norm(out, x, self.weight, self.eps)
        return out

    def add_forward(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """See `Norm.add_forward`."""
        if x is None:
            return self.forward(residual)
        out = torch.empty_like(x)
        fused.add_rms_norm(out, x, residual, self.weight, self.eps)
        return out


class QKNorm:
    """RMSNorm of each query and key head (https://arxiv.org/abs/2010.04245), before rotation.

    All query heads share one weight, all key heads another.

    Args:
        prefix: prefix of `q_norm` and `k_norm` in the checkpoint.
        qkv: the layer that computes what is normalised.
        centered: see `norm_weight`.
    """

    def __init__(
        self, weights: Weights, prefix: str, qkv: QKVParallelLinear, eps: float, centered: bool
    ) -> None:
        self.q_weight = norm_weight(weights, f"{prefix}.q_norm", qkv.head_dim, centered)
        self.k_weight = norm_weight(weights, f"{prefix}.k_norm", qkv.head_dim, centered)
        self.eps = eps
        self._num_heads = qkv.num_heads
        self._end = qkv.num_heads + qkv.num_kv_heads
        self._head_dim = qkv.head_dim

    def forward(self, qkv: torch.Tensor) -> None:
        """qkv `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, normalised in place."""
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        q, k = heads[:, : self._num_heads], heads[:, self._num_heads : self._end]
        fused.rms_norm(q, q, self.q_weight, self.eps)
        fused.rms_norm(k, k, self.k_weight, self.eps)


class WholeQKNorm(QKNorm):
    """RMSNorm over all query heads of a token together, and over all its key heads (OLMo 2). Each
    head element has a weight of its own, and the mean square is that of all ranks; with several of
    them the ops are torch's, and no decode step is recorded."""

    def __init__(
        self, weights: Weights, prefix: str, qkv: QKVParallelLinear, eps: float, centered: bool
    ) -> None:
        assert not centered
        self.eps = eps
        self._parallel = weights.parallel
        (q, q_start, q_total), (k, k_start, k_total), _ = qkv.parts
        self.q_weight, self.k_weight = weights.empty(q), weights.empty(k)
        weights.declare(f"{prefix}.q_norm.weight", WeightShard(self.q_weight, 0, q_start, q_total))
        weights.declare(f"{prefix}.k_norm.weight", WeightShard(self.k_weight, 0, k_start, k_total))

    def forward(self, qkv: torch.Tensor) -> None:
        """See `QKNorm.forward`."""
        q, k, _ = qkv.split([len(self.q_weight), len(self.k_weight), len(self.k_weight)], dim=1)
        if self._parallel.tp_size == 1:
            fused.rms_norm(q, q, self.q_weight, self.eps)
            fused.rms_norm(k, k, self.k_weight, self.eps)
            return
        # Every rank has as many heads as the others, also where a KV head is on several ranks.
        squares = torch.stack([part.float().square().mean(1) for part in (q, k)])
        mean = self._parallel.all_reduce(squares).div_(self._parallel.tp_size)
        scales = mean.add_(self.eps).rsqrt_().unsqueeze(2)
        for part, weight, scale in zip((q, k), (self.q_weight, self.k_weight), scales, strict=True):
            part.copy_((part * scale).to(weight.dtype).mul_(weight))


class LayerNorm:
    """Layer normalisation (https://arxiv.org/abs/1607.06450).

    Args:
        affine: whether it has a weight.
        bias: whether it has a bias beside it.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden_size: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
    ) -> None:
        self.weight = weights.replicated(f"{name}.weight", hidden_size) if affine else None
        has_bias = affine and bias
        self.bias = weights.replicated(f"{name}.bias", hidden_size) if has_bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm.forward`."""
        if not x.is_cpu:
            return self._by_torch(x)
        out = torch.empty_like(x)
        fused.layer_norm(out, x, self.weight, self.bias, self.eps)
        return out

    def add_forward(self, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """See `Norm.add_forward`."""
        if x is None:
            return self.forward(residual)
        if not x.is_cpu:
            return self._by_torch(residual.add_(x))
        out = torch.empty_like(x)
        fused.add_layer_norm(out, x, residual, self.weight, self.bias, self.eps)
        return out

    def _by_torch(self, x: torch.Tensor) -> torch.Tensor:
        # On a GPU the op is plain torch, which would copy its result into `out`.
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
