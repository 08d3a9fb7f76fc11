"""BART (https://arxiv.org/abs/1910.13461): an encoder that reads a whole prompt in both directions,
and a decoder whose layers also attend to what it has read; a norm after each part of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import (
    Attention,
    AttentionMetadata,
    KVCache,
    LayerStep,
    SelfAttention,
)
from tpengine.layers.cross_attention import CrossAttention
from tpengine.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.layers.linear import QKVParallelLinear, RowParallelLinear
from tpengine.layers.norm import LayerNorm, NoNorm
from tpengine.layers.weights import CheckpointTensor, LoadedTensor, Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.opt import NormsAfter
from tpengine.models.registry import check_plain_attention, require, unsupported
from tpengine.ops import fused_ops as fused

_POSITION_OFFSET = 2
"""Row of position 0 in the tables of positions, which count from after the padding id."""
_BIAS = "final_logits_bias"
_HEAD_DIM_STEP = 16
"""Other heads would be padded, which cross-attention does not do."""


def _parts(
    config: ModelConfig, weights: Weights, prefix: str, half: str
) -> tuple[SelfAttention, PlainMLP, Norms]:
    """Makes what a layer of either half has.

    Args:
        half: encoder or decoder.
    """
    hf, size, name = config.hf_config, config.hidden_size, f"{prefix}.self_attn"
    names = [f"{name}.{part}_proj" for part in "qkv"]
    qkv = QKVParallelLinear(weights, names, config, config.total_num_heads, bias=True)
    out = RowParallelLinear(weights, f"{name}.out_proj", size, size, bias=True)
    heads, rule = (qkv.num_heads, qkv.num_heads, qkv.head_dim), AttentionRule(qkv.head_dim**-0.5)
    attention = Attention(*heads, rule, is_bidirectional=half == "encoder")
    sizes = size, hf[f"{half}_ffn_dim"], hf["activation_function"]
    mlp = PlainMLP(weights, f"{prefix}.fc1", f"{prefix}.fc2", *sizes)
    first, last = (
        LayerNorm(weights, f"{prefix}.{name}", size)
        for name in ("self_attn_layer_norm", "final_layer_norm")
    )
    return SelfAttention(qkv, attention, out), mlp, Norms(after_attention=first, after_mlp=last)


class _CrossLayer(DecoderLayer):
    """A layer of the decoder: self-attention, cross-attention, MLP, each with a norm after it."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(*_parts(config, weights, prefix, "decoder"))
        self.cross = CrossAttention(config, weights, f"{prefix}.encoder_attn")
        self._cross_norm = LayerNorm(
            weights, f"{prefix}.encoder_attn_layer_norm", config.hidden_size
        )

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`; the returned residual is the layer's whole output."""
        if x is not None:
            fused.accumulate(residual, x)
        attended = self.attention.forward(residual, step)
        hidden = self.norms.after_attention.add_forward(attended, step.keep(residual))
        hidden = self._cross_norm.add_forward(self.cross.forward(hidden, step), hidden)
        return None, self.norms.after_mlp.add_forward(self.mlp.forward(hidden), hidden)


class _Entry:
    """What stands before the layers of a half: positions and a norm of the sum.

    Args:
        tokens: the table of the vocabulary, which both halves share.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, tokens: VocabParallelEmbedding
    ) -> None:
        size = config.hidden_size
        table = config.hf_config["max_position_embeddings"], size, _POSITION_OFFSET
        self._tokens = tokens
        self._positions = PositionEmbedding(weights, f"{prefix}.embed_positions", *table)
        self._norm = LayerNorm(weights, f"{prefix}.layernorm_embedding", size)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids, positions int32 `[num_tokens]` to `[num_tokens, hidden_size]`."""
        embedded = self._tokens.forward(token_ids)
        return self._norm.add_forward(self._positions.forward(positions), embedded)


class BartForConditionalGeneration(Decoder):
    """The whole model on one rank; as a `Decoder` it is the half that generates.

    Attributes:
        encoder: the layers of the other half.
    """

    base_prefix = "model."
    recordable = False
    own_fields = ("is_encoder_decoder",)
    layers: list[_CrossLayer]

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        require(config, "tie_word_embeddings", True, True)
        if config.head_dim % _HEAD_DIM_STEP:
            supported = f"multiples of {_HEAD_DIM_STEP}"
            raise unsupported(config, "d_model / attention heads", config.head_dim, supported)
        assert config.encoder is not None, "a model with two halves has it"
        size, prefix = config.hidden_size, f"{self.base_prefix}encoder"
        scale = math.sqrt(size) if config.hf_config["scale_embedding"] else 1.0
        name = f"{self.base_prefix}shared"
        self.embed_tokens = VocabParallelEmbedding(weights, name, config.vocab_size, size, scale)
        for half in ("encoder", "decoder"):
            for base in (self.base_prefix, ""):
                weights.declare_repeat(f"{base}{half}.embed_tokens.weight", f"{name}.weight")
        self._encoder_entry = _Entry(config, weights, prefix, self.embed_tokens)
        self.encoder = [
            NormsAfter(*_parts(config, weights, f"{prefix}.layers.{i}", "encoder"))
            for i in range(config.encoder.num_layers)
        ]
        prefix = f"{self.base_prefix}decoder"
        self._entry = _Entry(config, weights, prefix, self.embed_tokens)
        self.through_layers(
            config, weights, lambda i: _CrossLayer(config, weights, f"{prefix}.layers.{i}")
        )
        self.norm = NoNorm()
        self.lm_head = self.make_head(config, weights)
        self._bias = weights.replicated(_BIAS, 1, config.vocab_size)
        weights.convert = self._with_bias

    def _with_bias(self, tensors: Iterator[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """Adds a bias of zeros to a checkpoint without one, as of the bare model."""
        has_bias = False
        for file, name, source in tensors:
            has_bias = has_bias or name == _BIAS
            yield file, name, source
        if not has_bias:
            yield "", _BIAS, LoadedTensor(torch.zeros_like(self._bias))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        return None, self._entry.forward(token_ids, positions)

    def encode(
        self, token_ids: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> None:
        """See `worker.encoder_pass.TwoHalves`."""
        caches = list(kv_caches)
        step = LayerStep(caches[0], metadata, None)
        states = self._encoder_entry.forward(token_ids, metadata.positions)
        for layer in self.encoder:
            _, states = layer.forward(None, states, step)
        for decoder_layer, kv_cache in zip(self.layers, caches, strict=True):
            decoder_layer.cross.write(states, kv_cache, metadata)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.compute_logits`."""
        return super().compute_logits(hidden) + self._bias
