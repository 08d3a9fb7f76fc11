"""BERT (https://arxiv.org/abs/1810.04805), RoBERTa (https://arxiv.org/abs/1907.11692), XLM-RoBERTa
and CamemBERT: learned positions, a norm after each half of a layer, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tpengine.config import ModelConfig, first_position
from tpengine.layers.attention import Attention, AttentionMetadata, KVCache, SelfAttention
from tpengine.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm, NoNorm
from tpengine.layers.pooling import Dense, PoolingHead
from tpengine.layers.weights import Weights
from tpengine.models.decoder import DecoderLayer, Norms, PlainMLP
from tpengine.models.encoder import Encoder
from tpengine.models.opt import NormsAfter
from tpengine.models.registry import check_plain_attention, require


def _layer(config: ModelConfig, weights: Weights, prefix: str) -> DecoderLayer:
    hf, size, name = config.hf_config, config.hidden_size, f"{prefix}.attention"
    names = [f"{name}.self.{part}" for part in ("query", "key", "value")]
    qkv = QKVParallelLinear(weights, names, config, config.total_num_heads, bias=True)
    out = RowParallelLinear(weights, f"{name}.output.dense", size, size, bias=True)
    heads, rule = (qkv.num_heads, qkv.num_heads, qkv.head_dim), AttentionRule(qkv.head_dim**-0.5)
    attention = Attention(*heads, rule, is_bidirectional=True)
    first, second = (
        LayerNorm(weights, f"{part}.output.LayerNorm", size, hf["layer_norm_eps"])
        for part in (name, prefix)
    )
    up, down = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
    mlp = PlainMLP(weights, up, down, size, hf["intermediate_size"], hf["hidden_act"])
    norms = Norms(after_attention=first, after_mlp=second)
    return NormsAfter(SelfAttention(qkv, attention, out), mlp, norms)


class BertModel(Encoder):
    """The whole model on one rank, with a head for classes or without a head."""

    ignored_weights = (
        ".position_ids",
        ".token_type_ids",
        "pooler.dense.weight",
        "pooler.dense.bias",
    )
    base_prefix = "bert."
    heads = ("cls.", "lm_head.")
    classifier_names: ClassVar[tuple[str, str]] = ("bert.pooler.dense", "classifier")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        require(config, "is_decoder", False, False)
        require(config, "position_embedding_type", "absolute", "absolute")
        hf, size, prefix = config.hf_config, config.hidden_size, f"{self.base_prefix}embeddings"
        stage, offset = weights.parallel.stage, first_position(hf)
        positions = hf["max_position_embeddings"] - offset, size, offset
        with weights.held(stage.is_first):
            self.embed_tokens = VocabParallelEmbedding(
                weights, f"{prefix}.word_embeddings", config.vocab_size, size
            )
            self._positions = PositionEmbedding(
                weights, f"{prefix}.position_embeddings", *positions
            )
            types = f"{prefix}.token_type_embeddings", hf["type_vocab_size"], size
            self._types = PositionEmbedding(weights, *types)
            name = f"{prefix}.LayerNorm"
            self._embedding_norm = LayerNorm(weights, name, size, hf["layer_norm_eps"])
        prefix = f"{self.base_prefix}encoder.layer"
        self.through_layers(config, weights, lambda i: _layer(config, weights, f"{prefix}.{i}"))
        self.norm = NoNorm()
        with weights.held(stage.is_last):
            self.lm_head = self.make_pooling_head(config, weights)

    def classifier(
        self, config: ModelConfig, weights: Weights, num_labels: int
    ) -> Sequence[PoolingHead]:
        """See `Encoder.classifier`."""
        size, (first, second) = config.hidden_size, self.classifier_names
        dense = Dense.declared(weights, first, size, size, "tanh")
        return dense, Dense.declared(weights, second, size, num_labels)

    def forward(
        self,
        token_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `registry.CausalLM.forward`."""
        if hidden is None:
            types = metadata.token_types
            types = torch.zeros_like(token_ids) if types is None else types
            embedded = self.embed_tokens.forward(token_ids).add_(self._types.forward(types))
            positions = self._positions.forward(metadata.positions)
            hidden = self._embedding_norm.add_forward(positions, embedded)
        return super().forward(token_ids, kv_caches, metadata, hidden)


class RobertaModel(BertModel):
    """RoBERTa and those that differ from it only in their vocabulary."""

    base_prefix = "roberta."
    classifier_names = ("classifier.dense", "classifier.out_proj")
