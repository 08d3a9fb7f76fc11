"""BLOOM (https://arxiv.org/abs/2211.05100): linear biases instead of position embeddings (ALiBi), a
norm after the embeddings, and q, k and v fused head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention, LayerStep, SelfAttention
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import InterleavedQKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.registry import check_plain_attention, require, unsupported


def alibi_slopes(total_num_heads: int) -> list[float]:
    """Returns the bias per token of distance of each head (https://arxiv.org/abs/2108.12409).

    For a power of two this is the paper's geometric sequence. For other numbers it is the sequence
    of the next lower power of two, followed by every other element of the next higher one's.
    """
    power = 1 << (total_num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(total_num_heads - power)]
    return slopes + between


def rank_alibi_slopes(weights: Weights, total_num_heads: int) -> Tensor:
    """Returns this rank's slopes, float32 `[num_heads]`."""
    num_heads = weights.parallel.divide(total_num_heads, "attention heads")
    start = weights.parallel.tp_rank * num_heads
    slopes = alibi_slopes(total_num_heads)[start : start + num_heads]
    return weights.table(torch.tensor(slopes, dtype=torch.float32, device=weights.device))


def _attention(config: ModelConfig, weights: Weights, prefix: str, slopes: Tensor) -> SelfAttention:
    hidden_size, head_dim = config.hf_config["hidden_size"], config.head_dim
    qkv = InterleavedQKVParallelLinear(weights, f"{prefix}.query_key_value", config, bias=True)
    out = RowParallelLinear(weights, f"{prefix}.dense", hidden_size, hidden_size, bias=True)
    heads = qkv.num_heads
    rule = AttentionRule(head_dim**-0.5, slopes)
    return SelfAttention(qkv, Attention(heads, heads, head_dim, rule), out)


class _AddsToNormed(DecoderLayer):
    """One layer that adds each half to its input after the norm
    (`apply_residual_connection_post_layernorm`)."""

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`."""
        normed = self.norms.before_attention.add_forward(x, residual)
        attended = self.attention.forward(normed, step)
        normed = self.norms.before_mlp.add_forward(attended, step.keep(normed))
        return self.mlp.forward(normed), normed


def _layer(config: ModelConfig, weights: Weights, prefix: str, slopes: Tensor) -> DecoderLayer:
    hf = config.hf_config
    size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
    norms = Norms(
        before_attention=LayerNorm(weights, f"{prefix}.input_layernorm", size, eps),
        before_mlp=LayerNorm(weights, f"{prefix}.post_attention_layernorm", size, eps),
    )
    names = f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h"
    mlp = PlainMLP(weights, *names, size, 4 * size, "gelu_pytorch_tanh")
    adds_to_normed = hf.get("apply_residual_connection_post_layernorm")
    layer_class = _AddsToNormed if adds_to_normed else DecoderLayer
    attention = _attention(config, weights, f"{prefix}.self_attention", slopes)
    return layer_class(attention, mlp, norms)


class BloomForCausalLM(Decoder):
    """The whole model on one rank."""

    base_prefix = "transformer."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        hf = config.hf_config
        size, eps = hf["hidden_size"], hf["layer_norm_epsilon"]
        require(config, "n_inner", 4 * size, 4 * size)
        if hf.get("slow_but_exact") and int(hf.get("pretraining_tp") or 1) > 1:
            raise unsupported(config, "slow_but_exact", True, "False with pretraining_tp above 1")
        name = "transformer.word_embeddings"
        with weights.held(weights.parallel.stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(weights, name, config.vocab_size, size)
            self.embedding_norm = LayerNorm(weights, f"{name}_layernorm", size, eps)
        slopes = rank_alibi_slopes(weights, config.total_num_heads)
        self.through_layers(
            config, weights, lambda i: _layer(config, weights, f"transformer.h.{i}", slopes)
        )
        with weights.held(weights.parallel.stage.is_last):
            self.norm = LayerNorm(weights, "transformer.ln_f", size, eps)
            self.lm_head = self.make_head(config, weights)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        return None, self.embedding_norm.forward(self.embed_tokens.forward(token_ids))
