"""Attention of a decoder's tokens to what an encoder has read, in models with two halves.

K and V of the encoder's tokens lie in blocks of the KV cache, as those of a sequence, and are
written once. Each token of a step is a row of its own that sees all of them, so that the op for
decodes computes decodes and chunks alike.
"""

from __future__ import annotations

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import AttentionMetadata, KVCache, LayerStep
from tpengine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from tpengine.layers.weights import Weights
from tpengine.ops import attention_ops, cache_ops


class CrossAttention:
    """Cross-attention of one layer with its projections, with as many heads as self-attention.

    Args:
        prefix: in the checkpoint, before `q_proj`, `k_proj`, `v_proj` and `out_proj`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        size = config.hidden_size
        names = [f"{prefix}.{name}_proj" for name in ("q", "k", "v")]
        self._q = MergedColumnParallelLinear(weights, names[:1], size, [size], bias=True)
        self._kv = MergedColumnParallelLinear(weights, names[1:], size, [size] * 2, bias=True)
        self._out = RowParallelLinear(weights, f"{prefix}.out_proj", size, size, bias=True)
        self._head_dim = config.head_dim

    def write(self, states: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        """Writes K and V of the encoder's tokens into their slots.

        Args:
            states: `[num_tokens, hidden_size]`, what the encoder gives for them.
        """
        heads = self._kv.forward(states).view(len(states), 2, -1, self._head_dim)
        cache_ops.write_kv_cache(heads[:, 0], heads[:, 1], *kv_cache, metadata.slot_mapping)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """x `[num_kept, hidden_size]`, of the tokens that the layer keeps, to the same shape."""
        cross = step.metadata.cross
        assert cross is not None, "a step of a model with two halves has it"
        q = self._q.forward(x).view(len(x), -1, self._head_dim)
        out = q.new_empty(q.shape)
        rows = step.keep(cross.block_table), step.keep(cross.lengths)
        attention_ops.paged_attention(out, q, *step.kv_cache, *rows, self._head_dim**-0.5)
        return self._out.forward(out.flatten(1))
