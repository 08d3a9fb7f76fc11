"""GPT-2 (https://github.com/openai/gpt-2): learned positions, LayerNorm before each half of a
layer, fused q, k and v, and an MLP without a gate."""

from __future__ import annotations

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention, SelfAttention
from tpengine.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.registry import check_plain_attention

_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Endings of the matrices that the checkpoint has as `[in, out]`."""


def _attention(config: ModelConfig, weights: Weights, prefix: str, layer: int) -> SelfAttention:
    hf, head_dim, size = config.hf_config, config.head_dim, config.hidden_size
    names = [f"{prefix}.c_attn"] * 3
    qkv = QKVParallelLinear(weights, names, config, config.total_num_heads, bias=True)
    out = RowParallelLinear(weights, f"{prefix}.c_proj", size, size, bias=True)
    # `reorder_and_upcast_attn` needs nothing: scores are always float32.
    scale = head_dim**-0.5 if hf.get("scale_attn_weights", True) else 1.0
    if hf.get("scale_attn_by_inverse_layer_idx"):
        scale /= layer + 1
    attention = Attention(qkv.num_heads, qkv.num_heads, head_dim, AttentionRule(scale))
    return SelfAttention(qkv, attention, out)


def _layer(config: ModelConfig, weights: Weights, layer: int) -> DecoderLayer:
    hf, prefix = config.hf_config, f"transformer.h.{layer}"
    size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
    norms = Norms(
        before_attention=LayerNorm(weights, f"{prefix}.ln_1", size, eps),
        before_mlp=LayerNorm(weights, f"{prefix}.ln_2", size, eps),
    )
    names = f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj"
    inner = hf.get("n_inner") or 4 * size
    mlp = PlainMLP(weights, *names, size, inner, hf["activation_function"])
    return DecoderLayer(_attention(config, weights, f"{prefix}.attn", layer), mlp, norms)


class GPT2LMHeadModel(Decoder):
    """The whole model on one rank."""

    ignored_weights = (".attn.bias", ".attn.masked_bias")  # causal masks
    base_prefix = "transformer."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        hf = config.hf_config
        size = hf["hidden_size"]
        sizes = config.vocab_size, size
        positions = "transformer.wpe", hf["max_position_embeddings"], size
        with weights.held(weights.parallel.stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(weights, "transformer.wte", *sizes)
            self.embed_positions = PositionEmbedding(weights, *positions)
        self.through_layers(config, weights, lambda i: _layer(config, weights, i))
        with weights.held(weights.parallel.stage.is_last):
            self.norm = LayerNorm(weights, "transformer.ln_f", size, hf["layer_norm_epsilon"])
            self.lm_head = self.make_head(config, weights)
        weights.transpose(_TRANSPOSED)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        return self.embed_positions.forward(positions), self.embed_tokens.forward(token_ids)
