"""Llama 1 to 3 (https://arxiv.org/abs/2302.13971): pre-norm, rotary, grouped queries, gated MLP.

Its relatives differ from it only in a few traits (`LlamaTraits`); the file of each names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention, SelfAttention
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import QKNorm, RMSNorm
from tpengine.layers.rotary import build_cos_sin_cache, rope_parameters
from tpengine.layers.weights import Weights
from tpengine.models.decoder import MLP, Decoder, DecoderLayer, GatedMLP, Norms
from tpengine.models.registry import require, unsupported

PRE_NORMS = (("before_attention", "input_layernorm"), ("before_mlp", "post_attention_layernorm"))


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
        is_bidirectional: see `Attention`.
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
    is_bidirectional: bool = False


def rotary_table(
    config: ModelConfig, weights: Weights, hf_config: Mapping[str, Any], partial: bool = False
) -> Tensor:
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


class Blueprint(NamedTuple):
    """What the parts of a model on one rank are built from."""

    config: ModelConfig
    weights: Weights
    traits: LlamaTraits


def _attention(blueprint: Blueprint, layer: int, table: Tensor | None) -> SelfAttention:
    config, weights, traits = blueprint
    prefix, size = f"model.layers.{layer}.self_attn", config.hf_config["hidden_size"]
    head_dim, heads = config.head_dim, config.total_num_heads
    names = [f"{prefix}.{'qkv' if traits.fused else name}_proj" for name in "qkv"]
    qkv = QKVParallelLinear(weights, names, config, config.total_num_kv_heads, traits.qkv_bias)
    out = RowParallelLinear(weights, f"{prefix}.o_proj", heads * head_dim, size, traits.o_bias)
    qk_norm: QKNorm | None = None
    if traits.qk_norm is not None:
        eps = config.hf_config["rms_norm_eps"]
        qk_norm = traits.qk_norm(weights, prefix, qkv, eps, traits.centered_norms)
    scale = head_dim**-0.5 if traits.scale is None else traits.scale
    rule = AttentionRule(scale, window=traits.windows[layer], softcap=traits.softcap)
    heads_of_rank = qkv.num_heads, qkv.num_kv_heads, head_dim
    attention = Attention(*heads_of_rank, rule, table, traits.is_bidirectional)
    return SelfAttention(qkv, attention, out, qk_norm)


class LlamaMLP(GatedMLP):
    """Under the names of this family."""

    def __init__(self, blueprint: Blueprint, prefix: str, size: int | None = None) -> None:
        config, weights, traits = blueprint
        hf = config.hf_config
        sizes = hf["hidden_size"], size or hf["intermediate_size"]
        names = ["gate_up_proj"] * 2 if traits.fused else ["gate_proj", "up_proj"]
        names = [f"{prefix}.{name}" for name in names]
        activation = traits.activation or hf["hidden_act"]
        super().__init__(weights, names, f"{prefix}.down_proj", *sizes, activation, traits.mlp_bias)

    def partial_forward(self, x: Tensor) -> Tensor:
        """This rank's part of `forward`; the caller sums over ranks."""
        return self.down.partial_forward(self.activation(self.gate_up.forward(x)))


def _norm(blueprint: Blueprint, name: str) -> RMSNorm:
    """A norm of the residual, which is kept divided by `residual_scale`: what is added to it needs
    no factor, and its norm is the same if eps is divided by the square."""
    config, weights, traits = blueprint
    eps = config.hf_config["rms_norm_eps"] / traits.residual_scale**2
    size = config.hf_config["hidden_size"]
    return RMSNorm(weights, name, size, eps, traits.centered_norms)


class LlamaForCausalLM(Decoder):
    """The whole model on one rank; subclasses change the traits, and may replace the MLP."""

    ignored_weights = (".rotary_emb.inv_freq",)
    base_prefix = "model."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        traits = self.traits(config)
        if not traits.mlp_bias:
            require(config, "mlp_bias", False, False)
        blueprint = Blueprint(config, weights, traits)
        sizes = config.vocab_size, config.hidden_size
        scale = traits.embedding_scale
        with weights.held(weights.parallel.stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(weights, "model.embed_tokens", *sizes, scale)
        tables = self.rotary_tables(blueprint)
        self.through_layers(config, weights, lambda i: self._layer(blueprint, i, tables[i]))
        with weights.held(weights.parallel.stage.is_last):
            self.norm = _norm(blueprint, "model.norm")
            self.lm_head = self.make_head(config, weights, is_tied=False)

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """Returns the traits of this member of the family.

        Raises:
            ConfigError: the configuration asks for a feature that this member does not have.
        """
        require(config, "sliding_window", None, None)
        return replace(cls.biases(config), mlp_bias=bool(config.hf_config.get("mlp_bias")))

    @classmethod
    def biases(cls, config: ModelConfig) -> LlamaTraits:
        """Returns traits without windows, with biases of attention as the configuration says."""
        bias = bool(config.hf_config.get("attention_bias"))
        return LlamaTraits(windows=(None,) * config.num_layers, qkv_bias=bias, o_bias=bias)

    def _layer(self, blueprint: Blueprint, layer: int, table: Tensor | None) -> DecoderLayer:
        attention = _attention(blueprint, layer, table)
        mlp = self.make_mlp(blueprint, layer)
        norms = {
            place: _norm(blueprint, f"model.layers.{layer}.{name}")
            for place, name in blueprint.traits.norms
        }
        return DecoderLayer(attention, mlp, Norms(**norms))

    @classmethod
    def make_mlp(cls, blueprint: Blueprint, layer: int) -> MLP:
        """Builds what stands after the attention of a layer."""
        return LlamaMLP(blueprint, f"model.layers.{layer}.mlp")

    @classmethod
    def rotary_tables(cls, blueprint: Blueprint) -> Sequence[Tensor | None]:
        """Returns each layer's table of cosines and sines, None for a layer that does not rotate;
        here one table for all layers."""
        config, weights, traits = blueprint
        table = rotary_table(config, weights, config.hf_config, traits.partial_rotary)
        return [table] * config.num_layers
