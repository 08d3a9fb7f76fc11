"""Llama 1 to 3 (https://arxiv.org/abs/2302.13971): pre-norm, rotary, grouped queries, gated MLP.

Mistral, Qwen2 and Qwen3 differ from it only in a few traits (`LlamaTraits`); the file of each names
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpengine.config import ModelConfig
from tpengine.layers.activation import GatedActivation
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
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import QKNorm, RMSNorm
from tpengine.layers.rotary import build_cos_sin_cache, rope_parameters
from tpengine.layers.weights import Weights
from tpengine.models.registry import require, unsupported


@dataclass(frozen=True)
class LlamaTraits:
    """The differences between the members of the family.

    Attributes:
        windows: for each layer the number of tokens that a token sees, itself included; None: all.
        qkv_bias, o_bias, mlp_bias: which linear layers have biases.
        qk_norm: whether query and key heads are normalised before they are rotated.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def _attention(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    cos_sin_cache: torch.Tensor,
    traits: LlamaTraits,
    window: int | None,
) -> SelfAttention:
    hidden_size, head_dim = config.hf_config["hidden_size"], config.head_dim
    total_num_heads = config.total_num_heads
    qkv = QKVParallelLinear(
        weights,
        [f"{prefix}.{name}_proj" for name in "qkv"],
        hidden_size,
        total_num_heads,
        config.total_num_kv_heads,
        head_dim,
        traits.qkv_bias,
    )
    heads, kv_heads = qkv.num_heads, qkv.num_kv_heads
    out = RowParallelLinear(
        weights, f"{prefix}.o_proj", total_num_heads * head_dim, hidden_size, traits.o_bias
    )
    qk_norm: QKNorm | None = None
    if traits.qk_norm:
        eps = config.hf_config["rms_norm_eps"]
        qk_norm = QKNorm(weights, prefix, heads, kv_heads, head_dim, eps)
    attention = Attention(
        heads, kv_heads, head_dim, head_dim**-0.5, cos_sin_cache, sliding_window=window
    )
    return SelfAttention(qkv, attention, out, qk_norm)


class LlamaMLP:
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, bias: bool) -> None:
        hf = config.hf_config
        hidden_size, intermediate_size = hf["hidden_size"], hf["intermediate_size"]
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
        """x `[num_tokens, hidden_size]` to the same shape."""
        return self.down_proj.forward(self.activation.forward(self.gate_up_proj.forward(x)))


class LlamaDecoderLayer:
    """One layer; the residual is a separate tensor, and the norms add to it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer: int,
        cos_sin_cache: torch.Tensor,
        traits: LlamaTraits,
    ) -> None:
        prefix = f"model.layers.{layer}"
        hidden_size, eps = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"]
        self.self_attn = _attention(
            config, weights, f"{prefix}.self_attn", cos_sin_cache, traits, traits.windows[layer]
        )
        self.mlp = LlamaMLP(config, weights, f"{prefix}.mlp", traits.mlp_bias)
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
        if x is None:
            normed = self.input_layernorm.forward(residual)
        else:
            normed = self.input_layernorm.add_forward(x, residual)
        attended = self.self_attn.forward(normed, kv_cache, metadata, rows)
        residual = keep_rows(residual, rows)
        normed = self.post_attention_layernorm.add_forward(attended, residual)
        return self.mlp.forward(normed), residual


class LlamaForCausalLM:
    """The whole model on one rank; subclasses change the traits."""

    ignored_weights: tuple[str, ...] = (".rotary_emb.inv_freq",)
    base_prefix = "model."
    recordable = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hf = config.hf_config
        traits = self.traits(config)
        fraction = rope_parameters(hf)["partial_rotary_factor"]
        if fraction != 1.0:  # every member of the family rotates whole heads
            raise unsupported(config, "partial_rotary_factor", fraction, "1.0")
        hidden_size = hf["hidden_size"]
        cos_sin_cache = weights.table(
            build_cos_sin_cache(hf, config.head_dim, config.max_model_len, weights.device)
        )
        self.embed_tokens = VocabParallelEmbedding(
            weights, "model.embed_tokens", config.vocab_size, hidden_size
        )
        self.layers = [
            LlamaDecoderLayer(config, weights, i, cos_sin_cache, traits)
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

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """Returns the traits of this member of the family.

        Raises:
            ConfigError: the configuration asks for a feature that this member does not have.
        """
        require(config, "sliding_window", None, None)
        bias = bool(config.hf_config.get("attention_bias"))
        return LlamaTraits(
            windows=(None,) * config.num_layers,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(config.hf_config.get("mlp_bias")),
        )

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor:
        """token_ids int32 `[num_tokens]` to final hidden states `[num_wanted, hidden_size]`."""
        residual = self.embed_tokens.forward(token_ids)
        x = None
        for layer, kv_cache, rows in through_layers(self.layers, kv_caches, metadata):
            x, residual = layer.forward(x, residual, kv_cache, metadata, rows)
        assert x is not None
        return self.norm.add_forward(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)
