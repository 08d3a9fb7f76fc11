"""OPT (https://arxiv.org/abs/2205.01068) and Galactica: learned positions, LayerNorm before or
after each half of a layer, an MLP without a gate, and embeddings that may be narrower than the
layers."""

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
    ReplicatedLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.registry import check_heads_fill_hidden_size, require
from tpengine.ops import fused

_POSITION_OFFSET = 2
"""Row of position 0 in the checkpoint's table, which counts from after the padding id."""


def _attention(config: ModelConfig, weights: Weights, prefix: str) -> SelfAttention:
    hidden_size, bias = config.hf_config["hidden_size"], config.hf_config["enable_bias"]
    total_heads, head_dim = config.total_num_heads, config.head_dim
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    qkv = QKVParallelLinear(weights, names, hidden_size, total_heads, total_heads, head_dim, bias)
    out = RowParallelLinear(weights, f"{prefix}.out_proj", hidden_size, hidden_size, bias)
    heads = qkv.num_heads
    return SelfAttention(qkv, Attention(heads, heads, head_dim, head_dim**-0.5), out)


class OPTDecoderLayer:
    """One layer; a norm before each half (`do_layer_norm_before`) or after it."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hf = config.hf_config
        hidden_size, ffn_dim, bias = hf["hidden_size"], hf["ffn_dim"], hf["enable_bias"]
        affine = hf["layer_norm_elementwise_affine"]
        self.self_attn = _attention(config, weights, f"{prefix}.self_attn")
        self.self_attn_layer_norm = LayerNorm(
            weights, f"{prefix}.self_attn_layer_norm", hidden_size, affine=affine
        )
        self.fc1 = ColumnParallelLinear(weights, f"{prefix}.fc1", hidden_size, ffn_dim, bias)
        self.activation = plain_activation(hf["activation_function"])
        self.fc2 = RowParallelLinear(weights, f"{prefix}.fc2", ffn_dim, hidden_size, bias)
        self.final_layer_norm = LayerNorm(
            weights, f"{prefix}.final_layer_norm", hidden_size, affine=affine
        )

    def forward_norm_before(
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
        normed = self.self_attn_layer_norm.add_forward(x, residual)
        attended = self.self_attn.forward(normed, kv_cache, metadata, rows)
        residual = keep_rows(residual, rows)
        return self._mlp(self.final_layer_norm.add_forward(attended, residual)), residual

    def forward_norm_after(
        self,
        hidden: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """hidden `[num_tokens, hidden_size]`, overwritten, to `[num_kept, hidden_size]`."""
        attended = self.self_attn.forward(hidden, kv_cache, metadata, rows)
        hidden = self.self_attn_layer_norm.add_forward(attended, keep_rows(hidden, rows))
        return self.final_layer_norm.add_forward(self._mlp(hidden), hidden)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        up = self.fc1.forward(x)
        self.activation(up)
        return self.fc2.forward(up)


class OPTForCausalLM:
    """The whole model on one rank."""

    ignored_weights: tuple[str, ...] = ("decoder.version",)
    base_prefix = "model."
    recordable = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_heads_fill_hidden_size(config)
        require(config, "sliding_window", None, None)
        hf, prefix = config.hf_config, "model.decoder"
        hidden_size = hf["hidden_size"]
        embed_dim = hf.get("word_embed_proj_dim") or hidden_size
        self.embed_tokens = VocabParallelEmbedding(
            weights, f"{prefix}.embed_tokens", config.vocab_size, embed_dim
        )
        self.embed_positions = PositionEmbedding(
            weights,
            f"{prefix}.embed_positions",
            hf["max_position_embeddings"],
            hidden_size,
            _POSITION_OFFSET,
        )
        self.project_in: ReplicatedLinear | None = None
        self.project_out: ReplicatedLinear | None = None
        if embed_dim != hidden_size:
            self.project_in = ReplicatedLinear(
                weights, f"{prefix}.project_in", embed_dim, hidden_size
            )
            self.project_out = ReplicatedLinear(
                weights, f"{prefix}.project_out", hidden_size, embed_dim
            )
        self.layers = [
            OPTDecoderLayer(config, weights, f"{prefix}.layers.{i}")
            for i in range(config.num_layers)
        ]
        self.final_layer_norm: LayerNorm | None = None
        # Models with a norm after each layer have no final norm. _remove_final_layer_norm marks
        # checkpoints that were fine-tuned with a version of transformers that had none.
        self.norm_before = bool(hf["do_layer_norm_before"])
        if self.norm_before and not hf.get("_remove_final_layer_norm"):
            affine = hf["layer_norm_elementwise_affine"]
            self.final_layer_norm = LayerNorm(
                weights, f"{prefix}.final_layer_norm", hidden_size, affine=affine
            )
        tied = bool(hf.get("tie_word_embeddings", True))
        self.lm_head = ParallelLMHead(
            weights, "lm_head", config.vocab_size, embed_dim, self.embed_tokens if tied else None
        )

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to hidden states `[num_wanted, word_embed_proj_dim]`."""
        tokens = self.embed_tokens.forward(token_ids)
        if self.project_in is not None:
            tokens = self.project_in.forward(tokens)
        positions = self.embed_positions.forward(metadata.positions)
        if self.norm_before:
            hidden = self._norm_before(positions, tokens, kv_caches, metadata)
        else:
            fused.accumulate(tokens, positions)
            hidden = tokens
            for layer, kv_cache, rows in through_layers(self.layers, kv_caches, metadata):
                hidden = layer.forward_norm_after(hidden, kv_cache, metadata, rows)
        if self.project_out is not None:
            hidden = self.project_out.forward(hidden)
        return hidden

    def _norm_before(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Computes all layers from `x + residual`, both `[num_tokens, hidden_size]`."""
        for layer, kv_cache, rows in through_layers(self.layers, kv_caches, metadata):
            x, residual = layer.forward_norm_before(x, residual, kv_cache, metadata, rows)
        if self.final_layer_norm is not None:
            return self.final_layer_norm.add_forward(x, residual)
        fused.accumulate(residual, x)
        return residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, word_embed_proj_dim]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)
