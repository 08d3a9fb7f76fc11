"""GPT-2 (https://github.com/openai/gpt-2): learned positions, LayerNorm before each half of a
layer, fused q, k and v, and an MLP without a gate."""

from __future__ import annotations

import torch

from tpengine.config import ModelConfig
from tpengine.layers.activation import plain_activation
from tpengine.layers.attention import (
    Attention,
    AttentionMetadata,
    KVCache,
    SelfAttention,
    keep_rows,
    through_layers,
)
from tpengine.layers.embedding import (
    ParallelLMHead,
    PositionEmbedding,
    VocabParallelEmbedding,
)
from tpengine.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.registry import check_heads_fill_hidden_size, require

_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Endings of the matrices that the checkpoint has as `[in, out]`."""


def _attention(config: ModelConfig, weights: Weights, prefix: str, layer: int) -> SelfAttention:
    hf, heads, head_dim = config.hf_config, config.total_num_heads, config.head_dim
    size = hf["hidden_size"]
    names = [f"{prefix}.c_attn"] * 3
    qkv = QKVParallelLinear(weights, names, size, heads, heads, head_dim, bias=True)
    out = RowParallelLinear(weights, f"{prefix}.c_proj", size, size, bias=True)
    # `reorder_and_upcast_attn` needs nothing: scores are always float32.
    scale = head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    if hf.get("scale_attn_by_inverse_layer_idx"):
        scale /= layer + 1
    return SelfAttention(qkv, Attention(qkv.num_heads, qkv.num_heads, head_dim, scale), out)


class GPT2Block:
    """One layer."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        hf, prefix = config.hf_config, f"transformer.h.{layer}"
        size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
        inner = hf.get("n_inner") or 4 * size
        self.ln_1 = LayerNorm(weights, f"{prefix}.ln_1", size, eps)
        self.attn = _attention(config, weights, f"{prefix}.attn", layer)
        self.ln_2 = LayerNorm(weights, f"{prefix}.ln_2", size, eps)
        self.c_fc = ColumnParallelLinear(weights, f"{prefix}.mlp.c_fc", size, inner, bias=True)
        self.activation = plain_activation(hf["activation_function"])
        self.c_proj = RowParallelLinear(weights, f"{prefix}.mlp.c_proj", inner, size, bias=True)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to `residual` in place, then computes the layer.

        Args:
            x: output of the layer before, `[num_tokens, hidden_size]`.
            residual: `[num_tokens, hidden_size]`, overwritten.

        Returns:
            The layer's output, and the residual to which the next layer adds it; both
            `[num_kept, hidden_size]`, see `through_layers`.
        """
        normed = self.ln_1.add_forward(x, residual)
        attended = self.attn.forward(normed, kv_cache, metadata, rows)
        residual = keep_rows(residual, rows)
        up = self.c_fc.forward(self.ln_2.add_forward(attended, residual))
        self.activation(up)
        return self.c_proj.forward(up), residual


class GPT2LMHeadModel:
    """The whole model on one rank."""

    ignored_weights: tuple[str, ...] = (".attn.bias", ".attn.masked_bias")  # causal masks
    base_prefix = "transformer."
    recordable = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_heads_fill_hidden_size(config)
        require(config, "sliding_window", None, None)
        hf = config.hf_config
        size = hf["hidden_size"]
        self.wte = VocabParallelEmbedding(weights, "transformer.wte", config.vocab_size, size)
        self.wpe = PositionEmbedding(
            weights, "transformer.wpe", hf["max_position_embeddings"], size
        )
        self.h = [GPT2Block(config, weights, i) for i in range(config.num_layers)]
        self.ln_f = LayerNorm(weights, "transformer.ln_f", size, hf["layer_norm_epsilon"])
        tied = bool(hf.get("tie_word_embeddings", True))
        self.lm_head = ParallelLMHead(
            weights, "lm_head", config.vocab_size, size, self.wte if tied else None
        )
        weights.transpose(_TRANSPOSED)

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to final hidden states `[num_wanted, hidden_size]`."""
        residual = self.wte.forward(token_ids)
        x = self.wpe.forward(metadata.positions)
        for block, kv_cache, rows in through_layers(self.h, kv_caches, metadata):
            x, residual = block.forward(x, residual, kv_cache, metadata, rows)
        return self.ln_f.add_forward(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)
