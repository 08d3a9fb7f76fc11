"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia: attention and MLP of a layer have the
same input, a part of each head is rotated, and q, k and v are fused head by head."""

from __future__ import annotations

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention, LayerStep, SelfAttention
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import InterleavedQKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm
from tpengine.layers.weights import Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.llama import rotary_table
from tpengine.models.registry import check_plain_attention
from tpengine.ops import fused_ops as fused


class _ParallelLayer(DecoderLayer):
    """One layer whose attention and MLP have the same input (`use_parallel_residual`)."""

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`."""
        normed = self.norms.before_attention.add_forward(x, residual)
        attended = self.attention.forward(normed, step)
        residual = step.keep(residual)
        normed = self.norms.before_mlp.forward(residual)
        fused.accumulate(residual, attended)
        return self.mlp.forward(normed), residual


def _layer(config: ModelConfig, weights: Weights, prefix: str, table: Tensor) -> DecoderLayer:
    hf, head_dim = config.hf_config, config.head_dim
    size, bias = hf["hidden_size"], bool(hf.get("attention_bias", True))
    name = f"{prefix}.attention"
    qkv = InterleavedQKVParallelLinear(weights, f"{name}.query_key_value", config, bias)
    out = RowParallelLinear(weights, f"{name}.dense", size, size, bias)
    rule = AttentionRule(head_dim**-0.5)
    attention = Attention(qkv.num_heads, qkv.num_heads, head_dim, rule, table)
    names = f"{prefix}.mlp.dense_h_to_4h", f"{prefix}.mlp.dense_4h_to_h"
    mlp = PlainMLP(weights, *names, size, hf["intermediate_size"], hf["hidden_act"])
    first, second = (
        LayerNorm(weights, f"{prefix}.{name}", size, hf["layer_norm_eps"])
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    layer_class = _ParallelLayer if hf.get("use_parallel_residual", True) else DecoderLayer
    norms = Norms(before_attention=first, before_mlp=second)
    return layer_class(SelfAttention(qkv, attention, out), mlp, norms)


class GPTNeoXForCausalLM(Decoder):
    """The whole model on one rank."""

    ignored_weights = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    base_prefix = "gpt_neox."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        hf = config.hf_config
        sizes = config.vocab_size, hf["hidden_size"]
        with weights.held(weights.parallel.stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(weights, "gpt_neox.embed_in", *sizes)
        table = rotary_table(config, weights, hf, partial=True)
        self.through_layers(
            config, weights, lambda i: _layer(config, weights, f"gpt_neox.layers.{i}", table)
        )
        name = "gpt_neox.final_layer_norm"
        with weights.held(weights.parallel.stage.is_last):
            self.norm = LayerNorm(weights, name, hf["hidden_size"], hf["layer_norm_eps"])
            self.lm_head = self.make_head(config, weights, "embed_out", is_tied=False)
        # transformers 5 has another name for the output head than published checkpoints
        head = "embed_out.weight"  # or the table, if the two are tied
        if (head := weights.repeats.get(head, head)) in weights.shards:
            weights.declare_repeat("lm_head.weight", head)
