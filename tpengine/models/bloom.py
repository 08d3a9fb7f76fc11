"""BLOOM (https://arxiv.org/abs/2211.05100): linear biases instead of position embeddings (ALiBi), a
norm after the embeddings, and q, k and v fused head by head."""

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
from tpengine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpengine.layers.linear import (
    ColumnParallelLinear,
    InterleavedQKVParallelLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.registry import check_heads_fill_hidden_size, require, unsupported


def alibi_slopes(total_num_heads: int) -> list[float]:
    """Returns the bias per token of distance of each head (https://arxiv.org/abs/2108.12409).

    For a power of two this is the paper's geometric sequence. For other numbers it is the sequence
    of the next lower power of two, followed by every other element of the next higher one's.
    """
    power = 1 << (total_num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(total_num_heads - power)]
    return slopes + between


def rank_alibi_slopes(weights: Weights, total_num_heads: int) -> torch.Tensor:
    """Returns this rank's slopes, float32 `[num_heads]`."""
    num_heads = weights.parallel.divide(total_num_heads, "attention heads")
    start = weights.parallel.tp_rank * num_heads
    slopes = alibi_slopes(total_num_heads)[start : start + num_heads]
    return weights.table(torch.tensor(slopes, dtype=torch.float32, device=weights.device))


def _attention(
    config: ModelConfig, weights: Weights, prefix: str, slopes: torch.Tensor
) -> SelfAttention:
    hidden_size, head_dim = config.hf_config["hidden_size"], config.head_dim
    qkv = InterleavedQKVParallelLinear(
        weights,
        f"{prefix}.query_key_value",
        hidden_size,
        config.total_num_heads,
        head_dim,
        bias=True,
    )
    out = RowParallelLinear(weights, f"{prefix}.dense", hidden_size, hidden_size, bias=True)
    heads = qkv.num_heads
    attention = Attention(heads, heads, head_dim, head_dim**-0.5, alibi_slopes=slopes)
    return SelfAttention(qkv, attention, out)


class BloomBlock:
    """One layer.

    Each half is added to its own input before the norm, or after the norm if
    `apply_residual_connection_post_layernorm` is set.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, alibi_slopes: torch.Tensor
    ) -> None:
        hf = config.hf_config
        size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
        self.adds_to_normed = bool(hf.get("apply_residual_connection_post_layernorm"))
        self.input_layernorm = LayerNorm(weights, f"{prefix}.input_layernorm", size, eps)
        self.self_attention = _attention(config, weights, f"{prefix}.self_attention", alibi_slopes)
        self.post_attention_layernorm = LayerNorm(
            weights, f"{prefix}.post_attention_layernorm", size, eps
        )
        self.dense_h_to_4h = ColumnParallelLinear(
            weights, f"{prefix}.mlp.dense_h_to_4h", size, 4 * size, bias=True
        )
        self.activation = plain_activation("gelu_pytorch_tanh")
        self.dense_4h_to_h = RowParallelLinear(
            weights, f"{prefix}.mlp.dense_4h_to_h", 4 * size, size, bias=True
        )

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to `residual` in place, then computes the layer.

        Args:
            x: output of the layer before, `[num_tokens, hidden_size]`; None in the first layer.
            residual: `[num_tokens, hidden_size]`, overwritten.

        Returns:
            The layer's output, and the residual to which the next layer adds it; both
            `[num_kept, hidden_size]`, see `through_layers`.
        """
        normed = self.input_layernorm.add_forward(x, residual)
        if self.adds_to_normed:
            residual = normed
        attended = self.self_attention.forward(normed, kv_cache, metadata, rows)
        residual = keep_rows(residual, rows)
        normed = self.post_attention_layernorm.add_forward(attended, residual)
        if self.adds_to_normed:
            residual = normed
        up = self.dense_h_to_4h.forward(normed)
        self.activation(up)
        return self.dense_4h_to_h.forward(up), residual


class BloomForCausalLM:
    """The whole model on one rank."""

    ignored_weights: tuple[str, ...] = ()
    base_prefix = "transformer."
    recordable = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_heads_fill_hidden_size(config)
        require(config, "sliding_window", None, None)
        hf = config.hf_config
        size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
        require(config, "n_inner", 4 * size, 4 * size)
        if hf.get("slow_but_exact") and int(hf.get("pretraining_tp") or 1) > 1:
            raise unsupported(config, "slow_but_exact", True, "False with pretraining_tp above 1")
        self.word_embeddings = VocabParallelEmbedding(
            weights, "transformer.word_embeddings", config.vocab_size, size
        )
        self.word_embeddings_layernorm = LayerNorm(
            weights, "transformer.word_embeddings_layernorm", size, eps
        )
        slopes = rank_alibi_slopes(weights, config.total_num_heads)
        self.h = [
            BloomBlock(config, weights, f"transformer.h.{i}", slopes)
            for i in range(config.num_layers)
        ]
        self.ln_f = LayerNorm(weights, "transformer.ln_f", size, eps)
        tied = bool(hf.get("tie_word_embeddings", True))
        self.lm_head = ParallelLMHead(
            weights, "lm_head", config.vocab_size, size, self.word_embeddings if tied else None
        )

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to final hidden states `[num_wanted, hidden_size]`."""
        embedded = self.word_embeddings.forward(token_ids)
        residual = self.word_embeddings_layernorm.forward(embedded)
        x = None
        for block, kv_cache, rows in through_layers(self.h, kv_caches, metadata):
            x, residual = block.forward(x, residual, kv_cache, metadata, rows)
        assert x is not None
        return self.ln_f.add_forward(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)
