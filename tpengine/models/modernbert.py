"""ModernBERT (https://arxiv.org/abs/2412.13663): a norm before each half of a layer, rotary
positions, a gated MLP, and windows in most layers, which rotate by a frequency of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention, SelfAttention
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm
from tpengine.layers.pooling import ACTIVATIONS, Dense, PoolingHead
from tpengine.layers.weights import Weights
from tpengine.models.decoder import DecoderLayer, GatedMLP, Hidden, Norms
from tpengine.models.encoder import Encoder
from tpengine.models.gemma import rotary_tables_by_window
from tpengine.models.registry import check_plain_attention, half_windows, require

_OLD_THETAS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


class ModernBertModel(Encoder):
    """The whole model on one rank, with a head for classes or without a head."""

    base_prefix = "model."
    heads = ("head.", "decoder.")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        sizes, stage = (config.vocab_size, config.hidden_size), weights.parallel.stage
        with weights.held(stage.is_first):
            name = "model.embeddings.tok_embeddings"
            self.embed_tokens = VocabParallelEmbedding(weights, name, *sizes)
            self._embedding_norm = _norm(config, weights, "model.embeddings.norm")
        windows = _windows(config)
        tables = rotary_tables_by_window(config, weights, windows, _OLD_THETAS)
        rules = [AttentionRule(config.head_dim**-0.5, window=window) for window in windows]
        self.through_layers(
            config, weights, lambda i: _layer(config, weights, i, rules[i], tables[i])
        )
        with weights.held(stage.is_last):
            self.norm = _norm(config, weights, "model.final_norm")
            self.lm_head = self.make_pooling_head(config, weights)

    def classifier(
        self, config: ModelConfig, weights: Weights, num_labels: int
    ) -> Sequence[PoolingHead]:
        """See `Encoder.classifier`."""
        size, bias = config.hidden_size, config.hf_config["classifier_bias"]
        activation = require(config, "classifier_activation", "gelu", *ACTIVATIONS)
        return (
            Dense.declared(weights, "head.dense", size, size, activation, bias),
            _norm(config, weights, "head.norm"),
            Dense.declared(weights, "classifier", size, num_labels),
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        return None, self._embedding_norm.forward(self.embed_tokens.forward(token_ids))


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    hf = config.hf_config
    if not hf.get("layer_types"):  # transformers 4 has none
        every = hf["global_attn_every_n_layers"]
        kinds = [
            "sliding_attention" if i % every else "full_attention" for i in range(config.num_layers)
        ]
        config = replace(config, hf_config={**hf, "layer_types": kinds})
    return half_windows(config, "local_attention")


def _norm(config: ModelConfig, weights: Weights, name: str) -> LayerNorm:
    hf = config.hf_config
    return LayerNorm(weights, name, config.hidden_size, hf["norm_eps"], bias=hf["norm_bias"])


def _layer(
    config: ModelConfig, weights: Weights, layer: int, rule: AttentionRule, table: Tensor
) -> DecoderLayer:
    hf, prefix, size = config.hf_config, f"model.layers.{layer}", config.hidden_size
    bias = hf["attention_bias"]
    names = [f"{prefix}.attn.Wqkv"] * 3
    qkv = QKVParallelLinear(weights, names, config, config.total_num_heads, bias)
    out = RowParallelLinear(weights, f"{prefix}.attn.Wo", size, size, bias)
    heads = qkv.num_heads, qkv.num_heads, qkv.head_dim
    attention = Attention(*heads, rule, table, is_bidirectional=True)
    norms = Norms(before_mlp=_norm(config, weights, f"{prefix}.mlp_norm"))
    if layer:  # the embedding's norm stands before the first one
        norms = replace(norms, before_attention=_norm(config, weights, f"{prefix}.attn_norm"))
    mlp_names = [f"{prefix}.mlp.Wi"] * 2, f"{prefix}.mlp.Wo"
    sizes = size, hf["intermediate_size"]
    mlp = GatedMLP(weights, *mlp_names, *sizes, hf["hidden_activation"], hf["mlp_bias"])
    return DecoderLayer(SelfAttention(qkv, attention, out), mlp, norms)
