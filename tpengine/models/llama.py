"""Llama 1 to 3 (https://arxiv.org/abs/2302.13971): pre-norm, rotary, grouped queries, gated MLP.

Mistral, Qwen2 and Qwen3 differ from it only in a few traits (`LlamaTraits`); the file of each names
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
        centered_norms: whether norm weights of the checkpoint are distances from 1.
        activation: of the MLP's gate; None: the configuration's `hidden_act`.
        embedding_scale: factor on the embeddings.
        scale: factor on the products of queries and keys; None: `head_dim**-0.5`.
        softcap: of attention logits; None: they have none.
        fused: whether the checkpoint has q, k and v in one tensor, `qkv_proj`, and gate and up in
            another, `gate_up_proj`.
        partial_rotary: whether `partial_rotary_factor` may be less than 1: then only the first
            elements of a head are rotated.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    centered_norms: bool = False
    activation: str | None = None
    embedding_scale: float = 1.0
    scale: float | None = None
    softcap: float | None = None
    fused: bool = False
    partial_rotary: bool = False


def rotary_table(
    config: ModelConfig, weights: Weights, hf_config: Mapping[str, Any], partial: bool = False
) -> torch.Tensor:
    """Computes the cosines and sines of rotary fields.

    Args:
        hf_config: the model's configuration, or as it is for some of the layers.
        partial: whether a part of each head may be rotated.

    Raises:
        ConfigError: a part of a head is rotated, or a kind of scaling is not supported.
    """
    fraction = rope_parameters(hf_config)["partial_rotary_factor"]
    if fraction != 1.0 and not partial:
        raise unsupported(config, "partial_rotary_factor", fraction, "1.0")
    return weights.table(
        build_cos_sin_cache(hf_config, config.head_dim, config.max_model_len, weights.device)
    )


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
        [f"{prefix}.{'qkv' if traits.fused else name}_proj" for name in "qkv"],
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
        centered = traits.centered_norms
        qk_norm = QKNorm(weights, prefix, heads, kv_heads, head_dim, eps, centered)
    scale = head_dim**-0.5 if traits.scale is None else traits.scale
    attention = Attention(
        heads, kv_heads, head_dim, scale, cos_sin_cache, window, softcap=traits.softcap
    )
    return SelfAttention(qkv, attention, out, qk_norm)


class LlamaMLP:
    """`down(act(gate(x)) * up(x))`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        prefix: str,
        traits: LlamaTraits,
        intermediate_size: int | None = None,
    ) -> None:
        hf, bias = config.hf_config, traits.mlp_bias
        hidden_size = hf["hidden_size"]
        intermediate_size = intermediate_size or hf["intermediate_size"]
        names = ["gate_up_proj"] * 2 if traits.fused else ["gate_proj", "up_proj"]
        self.gate_up_proj = MergedColumnParallelLinear(
            weights,
            [f"{prefix}.{name}" for name in names],
            hidden_size,
            [intermediate_size] * 2,
            bias,
        )
        self.down_proj = RowParallelLinear(
            weights, f"{prefix}.down_proj", intermediate_size, hidden_size, bias
        )
        self.activation = GatedActivation(traits.activation or hf["hidden_act"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]` to the same shape."""
        return self.down_proj.forward(self.activation.forward(self.gate_up_proj.forward(x)))

    def partial_forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of `forward`; the caller sums over ranks."""
        return self.down_proj.partial_forward(self.activation.forward(self.gate_up_proj.forward(x)))


class MLP(Protocol):
    """What follows the attention of a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden_size]` to the same shape, summed over ranks."""


class LlamaDecoderLayer:
    """One layer; the residual is a separate tensor, and the norms add to it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer: int,
        cos_sin_cache: torch.Tensor,
        traits: LlamaTraits,
        mlp: MLP,
    ) -> None:
        prefix = f"model.layers.{layer}"
        hidden_size, eps = config.hf_config["hidden_size"], config.hf_config["rms_norm_eps"]
        self.self_attn = _attention(
            config, weights, f"{prefix}.self_attn", cos_sin_cache, traits, traits.windows[layer]
        )
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(weights, f"{prefix}.{name}", hidden_size, eps, traits.centered_norms)
            for name in ("input_layernorm", "post_attention_layernorm")
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
        attended = self.self_attn.forward(normed, kv_cache, metadata, rows)
        residual = keep_rows(residual, rows)
        normed = self.post_attention_layernorm.add_forward(attended, residual)
        return self.mlp.forward(normed), residual


class LlamaForCausalLM:
    """The whole model on one rank; subclasses change the traits, and may replace the MLP."""

    ignored_weights: tuple[str, ...] = (".rotary_emb.inv_freq",)
    base_prefix = "model."
    recordable = True
    layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hf = config.hf_config
        traits = self.traits(config)
        hidden_size, centered = hf["hidden_size"], traits.centered_norms
        self.embed_tokens = VocabParallelEmbedding(
            weights, "model.embed_tokens", config.vocab_size, hidden_size, traits.embedding_scale
        )
        tables = self.rotary_tables(config, weights, traits)
        self.layers = [
            self.layer_class(
                config, weights, i, table, traits, self.make_mlp(config, weights, i, traits)
            )
            for i, table in enumerate(tables)
        ]
        self.norm = RMSNorm(weights, "model.norm", hidden_size, hf["rms_norm_eps"], centered)
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

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, weights: Weights, layer: int, traits: LlamaTraits
    ) -> MLP:
        """Builds what stands after the attention of a layer."""
        return LlamaMLP(config, weights, f"model.layers.{layer}.mlp", traits)

    @classmethod
    def rotary_tables(
        cls, config: ModelConfig, weights: Weights, traits: LlamaTraits
    ) -> list[torch.Tensor]:
        """Returns each layer's table of cosines and sines; here one table for all layers."""
        table = rotary_table(config, weights, config.hf_config, traits.partial_rotary)
        return [table] * config.num_layers

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
