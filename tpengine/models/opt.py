"""OPT (https://arxiv.org/abs/2205.01068) and Galactica: learned positions, LayerNorm before or
after each half of a layer, an MLP without a gate, and embeddings that may be narrower than the
layers."""

from __future__ import annotations

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import (
    Attention,
    AttentionMetadata,
    KVCache,
    LayerStep,
    SelfAttention,
)
from tpengine.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm, NoNorm
from tpengine.layers.weights import Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.registry import check_plain_attention
from tpengine.ops import fused_ops as fused

_POSITION_OFFSET = 2
"""Row of position 0 in the checkpoint's table, which counts from after the padding id."""


def layer_parts(
    config: ModelConfig,
    weights: Weights,
    prefix: str,
    ffn_dim: int,
    norms_before: bool,
    bias: bool = True,
    affine: bool = True,
    is_bidirectional: bool = False,
) -> tuple[SelfAttention, PlainMLP, Norms]:
    """Makes what a layer of OPT has, and one of BART's halves under the same names.

    Args:
        norms_before: whether norms stand before attention and MLP, not after them.
        affine: see `LayerNorm`.
        is_bidirectional: see `Attention`.
    """
    size, name = config.hidden_size, f"{prefix}.self_attn"
    names = [f"{name}.{part}_proj" for part in "qkv"]
    qkv = QKVParallelLinear(weights, names, config, config.total_num_heads, bias)
    out = RowParallelLinear(weights, f"{name}.out_proj", size, size, bias)
    heads, rule = (qkv.num_heads, qkv.num_heads, qkv.head_dim), AttentionRule(qkv.head_dim**-0.5)
    attention = Attention(*heads, rule, is_bidirectional=is_bidirectional)
    sizes = size, ffn_dim, config.hf_config["activation_function"]
    mlp = PlainMLP(weights, f"{prefix}.fc1", f"{prefix}.fc2", *sizes, bias)
    first, last = (
        LayerNorm(weights, f"{prefix}.{name}", size, affine=affine)
        for name in ("self_attn_layer_norm", "final_layer_norm")
    )
    norms = Norms(before_attention=first, before_mlp=last)
    if not norms_before:
        norms = Norms(after_attention=first, after_mlp=last)
    return SelfAttention(qkv, attention, out), mlp, norms


class NormsAfter(DecoderLayer):
    """One layer that normalises after each sum, not before each half (`do_layer_norm_before` is
    false)."""

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`; the returned residual is the layer's whole output."""
        if x is not None:
            fused.accumulate(residual, x)
        attended = self.attention.forward(residual, step)
        hidden = self.norms.after_attention.add_forward(attended, step.keep(residual))
        return None, self.norms.after_mlp.add_forward(self.mlp.forward(hidden), hidden)


def _layer(config: ModelConfig, weights: Weights, prefix: str) -> DecoderLayer:
    hf = config.hf_config
    norms_before = hf["do_layer_norm_before"]
    options = norms_before, hf["enable_bias"], hf["layer_norm_elementwise_affine"]
    layer_class = DecoderLayer if norms_before else NormsAfter
    return layer_class(*layer_parts(config, weights, prefix, hf["ffn_dim"], *options))


class OPTForCausalLM(Decoder):
    """The whole model on one rank."""

    ignored_weights = ("decoder.version",)
    base_prefix = "model."

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        hf, prefix = config.hf_config, "model.decoder"
        hidden_size = hf["hidden_size"]
        embed_dim = hf.get("word_embed_proj_dim") or hidden_size
        table = hf["max_position_embeddings"], hidden_size, _POSITION_OFFSET
        self.project_in: ReplicatedLinear | None = None
        self.project_out: ReplicatedLinear | None = None
        with weights.held(weights.parallel.stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(
                weights, f"{prefix}.embed_tokens", config.vocab_size, embed_dim
            )
            self.embed_positions = PositionEmbedding(weights, f"{prefix}.embed_positions", *table)
            if embed_dim != hidden_size:
                name = f"{prefix}.project_in"
                self.project_in = ReplicatedLinear(weights, name, embed_dim, hidden_size)
        self.through_layers(
            config, weights, lambda i: _layer(config, weights, f"{prefix}.layers.{i}")
        )
        self.norm = NoNorm()
        with weights.held(weights.parallel.stage.is_last):
            # Models with a norm after each layer have no final norm. _remove_final_layer_norm marks
            # checkpoints that were fine-tuned with a version of transformers that had none.
            if hf["do_layer_norm_before"] and not hf.get("_remove_final_layer_norm"):
                name, affine = f"{prefix}.final_layer_norm", hf["layer_norm_elementwise_affine"]
                self.norm = LayerNorm(weights, name, hidden_size, affine=affine)
            if embed_dim != hidden_size:
                name = f"{prefix}.project_out"
                self.project_out = ReplicatedLinear(weights, name, hidden_size, embed_dim)
            self.lm_head = self.make_head(config, weights)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        tokens = self.embed_tokens.forward(token_ids)
        if self.project_in is not None:
            tokens = self.project_in.forward(tokens)
        return self.embed_positions.forward(positions), tokens

    def forward(
        self,
        token_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `registry.CausalLM.forward`; the last stage returns rows of
        `word_embed_proj_dim`."""
        hidden = super().forward(token_ids, kv_caches, metadata, hidden)
        if self.project_out is None or not self.stage.is_last:
            return hidden
        return self.project_out.forward(hidden)
