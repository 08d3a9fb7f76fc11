"""Llama 1 to 3 (https://arxiv.org/abs/2302.13971): pre-norm, rotary, grouped queries, gated MLP.

Its relatives differ from it only in a few traits (`LlamaTraits`); the file of each names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpengine.config import ModelConfig
from tpengine.layers.activation import GatedActivation
from tpengine.layers.attention import Attention, SelfAttention
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from tpengine.layers.norm import QKNorm, RMSNorm
from tpengine.layers.rotary import build_cos_sin_cache, rope_parameters
from tpengine.layers.weights import Weights
from tpengine.models.decoder import MLP, Decoder, DecoderLayer, Norms, make_head
from tpengine.models.registry import require, unsupported

PRE_NORMS = (
    ("before_attention", "input_layernorm"),
    ("before_mlp", "post_attention_layernorm"),
)


@dataclass(frozen=True)
class LlamaTraits:
    """The differences between the members of the family.

    Attributes:
        windows: for each layer the number of tokens that a token sees, itself included; None: all.
        qkv_bias, o_bias, mlp_bias: which linear layers have biases.
        norms: names of the norms of a layer, by field of `Norms`.
        qk_norm: normalises queries and keys before they are rotated; None: they are not normalised.
        centered_norms: whether norm weights of the checkpoint are distances from 1.
        activation: of the MLP's gate; None: the configuration's `hidden_act`.
        embedding_scale: factor on the embeddings.
        residual_scale: factor on what attention and MLP give, before it is added; see `_norm`.
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
    norms: tuple[tuple[str, str], ...] = PRE_NORMS
    qk_norm: type[QKNorm] | None = None
    centered_norms: bool = False
    activation: str | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
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
    cos_sin_cache: torch.Tensor | None,
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
    out = RowParallelLinear(
        weights, f"{prefix}.o_proj", total_num_heads * head_dim, hidden_size, traits.o_bias
    )
    qk_norm: QKNorm | None = None
    if traits.qk_norm is not None:
        eps = config.hf_config["rms_norm_eps"]
        qk_norm = traits.qk_norm(weights, prefix, qkv, head_dim, eps, traits.centered_norms)
    scale = head_dim**-0.5 if traits.scale is None else traits.scale
    rule = AttentionRule(scale, window=window, softcap=traits.softcap)
    attention = Attention(qkv.num_heads, qkv.num_kv_heads, head_dim, rule, cos_sin_cache)
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


def _norm(config: ModelConfig, weights: Weights, name: str, traits: LlamaTraits) -> RMSNorm:
    """A norm of the residual, which is kept divided by `residual_scale`: what is added to it needs
    no factor, and its norm is the same if eps is divided by the square."""
    hf = config.hf_config
    eps = hf["rms_norm_eps"] / traits.residual_scale**2
    return RMSNorm(weights, name, hf["hidden_size"], eps, traits.centered_norms)


class LlamaForCausalLM(Decoder):
    """The whole model on one rank; subclasses change the traits, and may replace the MLP."""

    ignored_weights = (".rotary_emb.inv_freq",)
    base_prefix = "model."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        traits = self.traits(config)
        sizes = config.vocab_size, config.hf_config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding(
            weights, "model.embed_tokens", *sizes, traits.embedding_scale
        )
        tables = self.rotary_tables(config, weights, traits)
        self.layers = [self._layer(config, weights, i, x, traits) for i, x in enumerate(tables)]
        self.norm = _norm(config, weights, "model.norm", traits)
        self.lm_head = make_head(config, weights, self.embed_tokens, is_tied=False)

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """Returns the traits of this member of the family.

        Raises:
            ConfigError: the configuration asks for a feature that this member does not have.
        """
        require(config, "sliding_window", None, None)
        return cls.biases(config)

    @classmethod
    def biases(cls, config: ModelConfig) -> LlamaTraits:
        """Returns Llama's traits: no windows, and biases as the configuration says."""
        bias = bool(config.hf_config.get("attention_bias"))
        return LlamaTraits(
            windows=(None,) * config.num_layers,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(config.hf_config.get("mlp_bias")),
        )

    def _layer(
        self,
        config: ModelConfig,
        weights: Weights,
        layer: int,
        cos_sin_cache: torch.Tensor | None,
        traits: LlamaTraits,
    ) -> DecoderLayer:
        prefix, window = f"model.layers.{layer}", traits.windows[layer]
        name = f"{prefix}.self_attn"
        attention = _attention(config, weights, name, cos_sin_cache, traits, window)
        mlp = self.make_mlp(config, weights, layer, traits)
        norms = {place: f"{prefix}.{name}" for place, name in traits.norms}
        made = {place: _norm(config, weights, name, traits) for place, name in norms.items()}
        return DecoderLayer(attention, mlp, Norms(**made))

    @classmethod
    def make_mlp(
        cls, config: ModelConfig, weights: Weights, layer: int, traits: LlamaTraits
    ) -> MLP:
        """Builds what stands after the attention of a layer."""
        return LlamaMLP(config, weights, f"model.layers.{layer}.mlp", traits)

    @classmethod
    def rotary_tables(
        cls, config: ModelConfig, weights: Weights, traits: LlamaTraits
    ) -> Sequence[torch.Tensor | None]:
        """Returns each layer's table of cosines and sines, None for a layer that does not rotate;
        here one table for all layers."""
        table = rotary_table(config, weights, config.hf_config, traits.partial_rotary)
        return [table] * config.num_layers
