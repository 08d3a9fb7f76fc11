"""Llama 1 to 3 (https://arxiv.org/abs/2302.13971): pre-norm, rotary, grouped queries, gated MLP."""

from __future__ import annotations

import torch

from tpengine.config import ModelConfig
from tpengine.layers.activation import GatedActivation
from tpengine.layers.attention import Attention, AttentionMetadata, KVCache
from tpengine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpengine.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import RMSNorm
from tpengine.layers.rotary import build_cos_sin_cache
from tpengine.layers.weights import Weights


class LlamaAttention:
    """Projections around the paged attention."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, cos_sin_cache: torch.Tensor
    ) -> None:
        hidden_size = config.hf_config["hidden_size"]
        bias = bool(config.hf_config.get("attention_bias", False))
        self.qkv_proj = QKVParallelLinear(
            weights,
            [f"{prefix}.{name}_proj" for name in "qkv"],
            hidden_size,
            config.total_num_heads,
            config.total_num_kv_heads,
            config.head_dim,
            bias,
        )
        self.o_proj = RowParallelLinear(
            weights,
            f"{prefix}.o_proj",
            config.total_num_heads * config.head_dim,
            hidden_size,
            bias,
        )
        self.attention = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5,
            cos_sin_cache,
        )

    def forward(
        self, x: torch.Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x `[num_tokens, hidden_size]`, likewise returned."""
        qkv = self.qkv_proj.forward(x)
        return self.o_proj.forward(self.attention.forward(qkv, kv_cache, metadata))


class LlamaMLP:
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hf = config.hf_config
        hidden_size, intermediate_size = hf["hidden_size"], hf["intermediate_size"]
        bias = bool(hf.get("mlp_bias", False))
        self.gate_up_proj = MergedColumnParallelLinear(
            weights,
            [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
            hidden_size,
            [intermediate_size] * 2,
            bias,
        )
        self.down_proj = RowParallelLinear(
            weights, f"{prefix}.down_proj", intermediate_size, hidden_size, bias
        )
        self.activation = GatedActivation(hf["hidden_act"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]`, likewise returned."""
        return self.down_proj.forward(self.activation.forward(self.gate_up_proj.forward(x)))


class LlamaDecoderLayer:
    """One layer; the residual stream is carried beside the activations and added in the norms."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, cos_sin_cache: torch.Tensor
    ) -> None:
        hidden_size, eps = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"]
        self.self_attn = LlamaAttention(config, weights, f"{prefix}.self_attn", cos_sin_cache)
        self.mlp = LlamaMLP(config, weights, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(weights, f"{prefix}.input_layernorm", hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(
            weights, f"{prefix}.post_attention_layernorm", hidden_size, eps
        )

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Adds x to `residual` in place (None: nothing yet) and returns what is to be added next.

        x, residual and result: `[num_tokens, hidden_size]`.
        """
        if x is None:
            normed = self.input_layernorm.forward(residual)
        else:
            normed = self.input_layernorm.add_forward(x, residual)
        attended = self.self_attn.forward(normed, kv_cache, metadata)
        normed = self.post_attention_layernorm.add_forward(attended, residual)
        return self.mlp.forward(normed)


class LlamaForCausalLM:
    """The whole model on one rank."""

    ignored_weights = (".rotary_emb.inv_freq",)
    """Endings of checkpoint names that are computed, not loaded."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hf = config.hf_config
        hidden_size = hf["hidden_size"]
        cos_sin_cache = build_cos_sin_cache(
            hf, config.head_dim, config.max_model_len, weights.device
        )
        self.embed_tokens = VocabParallelEmbedding(
            weights, "model.embed_tokens", config.vocab_size, hidden_size
        )
        self.layers = [
            LlamaDecoderLayer(config, weights, f"model.layers.{i}", cos_sin_cache)
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights, "model.norm", hidden_size, hf["rms_norm_eps"])
        tied = bool(hf.get("tie_word_embeddings", False))
        self.lm_head = ParallelLMHead(
            weights,
            "lm_head",
            config.vocab_size,
            hidden_size,
            self.embed_tokens if tied else None,
        )
        if tied:
            self.ignored_weights = (*self.ignored_weights, "lm_head.weight")

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids `[num_tokens]` to final hidden states `[num_tokens, hidden_size]`."""
        residual = self.embed_tokens.forward(token_ids)
        x = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer.forward(x, residual, kv_cache, metadata)
        assert x is not None
        return self.norm.add_forward(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)
