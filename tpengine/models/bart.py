"""BART (https://arxiv.org/abs/1910.13461) and its relatives mBART, Marian, Pegasus and Whisper: an
encoder that reads a whole prompt in both directions, and a decoder whose layers also attend to what
it has read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.attention import AttentionMetadata, KVCache, LayerStep, SelfAttention
from tpengine.layers.cross_attention import CrossAttention
from tpengine.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tpengine.layers.norm import LayerNorm, NoNorm, Norm
from tpengine.layers.weights import CheckpointTensor, LoadedTensor, Weights
from tpengine.models.decoder import Decoder, DecoderLayer, Hidden, Norms, PlainMLP
from tpengine.models.opt import NormsAfter, layer_parts
from tpengine.models.registry import check_plain_attention, require, unsupported
from tpengine.ops import fused_ops as fused


@dataclass(frozen=True)
class _Family:
    """How the relatives differ.

    Attributes:
        position_offset: row of position 0 in tables of positions that are learned.
        is_sinusoidal: positions are sines and cosines; a checkpoint may leave them out.
        has_embedding_norm: a norm stands between the embeddings and the layers of each half.
        norms_before: norms stand before the parts of a layer, and one after all layers of each
            half; else one after each part.
    """

    position_offset: int = 0
    is_sinusoidal: bool = False
    has_embedding_norm: bool = False
    norms_before: bool = False


_FAMILIES = {
    "Bart": _Family(position_offset=2, has_embedding_norm=True),
    "MBart": _Family(position_offset=2, has_embedding_norm=True, norms_before=True),
    "Marian": _Family(is_sinusoidal=True),
    "Pegasus": _Family(is_sinusoidal=True, norms_before=True),
    "Whisper": _Family(norms_before=True),
}
"""By the start of the name of an architecture."""
_BIAS = "final_logits_bias"
_HEAD_DIM_STEP = 16
"""Other heads would be padded, which cross-attention does not do."""


def _family(config: ModelConfig) -> _Family:
    return next(own for name, own in _FAMILIES.items() if config.architecture.startswith(name))


def _sines(num_positions: int, size: int) -> Tensor:
    """Positions of sines, then cosines, float32 `[num_positions, size]`."""
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) / 10000.0**exponents
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def _parts(
    config: ModelConfig, weights: Weights, prefix: str, half: str
) -> tuple[SelfAttention, PlainMLP, Norms]:
    """Makes what a layer of either half has.

    Args:
        half: encoder or decoder.
    """
    ffn_dim, norms_before = config.hf_config[f"{half}_ffn_dim"], _family(config).norms_before
    is_encoder = half == "encoder"
    return layer_parts(config, weights, prefix, ffn_dim, norms_before, is_bidirectional=is_encoder)


class _CrossLayer(DecoderLayer):
    """A layer of the decoder: self-attention, cross-attention, MLP, each with a norm before it."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        super().__init__(*_parts(config, weights, prefix, "decoder"))
        self.cross = CrossAttention(config, weights, f"{prefix}.encoder_attn")
        self._cross_norm = LayerNorm(
            weights, f"{prefix}.encoder_attn_layer_norm", config.hidden_size
        )

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`."""
        normed = self.norms.before_attention.add_forward(x, residual)
        attended = self.attention.forward(normed, step)
        residual = step.keep(residual)
        normed = self._cross_norm.add_forward(attended, residual)
        crossed = self.cross.forward(normed, step)
        return self.mlp.forward(self.norms.before_mlp.add_forward(crossed, residual)), residual


class _CrossNormsAfter(_CrossLayer):
    """The same with a norm after each part."""

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """See `DecoderLayer.forward`; the returned residual is the layer's whole output."""
        if x is not None:
            fused.accumulate(residual, x)
        attended = self.attention.forward(residual, step)
        hidden = self.norms.after_attention.add_forward(attended, step.keep(residual))
        hidden = self._cross_norm.add_forward(self.cross.forward(hidden, step), hidden)
        return None, self.norms.after_mlp.add_forward(self.mlp.forward(hidden), hidden)


class _Ends:
    """What stands before the layers of a half, positions and a norm of the sum, and the norm after
    them.

    Attributes:
        last_norm: of the last layer's output.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, num_positions: int
    ) -> None:
        size, family = config.hidden_size, _family(config)
        table = num_positions, size, family.position_offset
        self._positions = PositionEmbedding(weights, f"{prefix}.embed_positions", *table)
        self._norm: Norm = NoNorm()
        self.last_norm: Norm = NoNorm()
        if family.has_embedding_norm:
            self._norm = LayerNorm(weights, f"{prefix}.layernorm_embedding", size)
        if family.norms_before:
            self.last_norm = LayerNorm(weights, f"{prefix}.layer_norm", size)

    def embed(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """embedded `[num_tokens, hidden_size]`, positions int32 `[num_tokens]` to the shape of
        embedded."""
        return self._norm.add_forward(self._positions.forward(positions), embedded)


class EncoderDecoder(Decoder):
    """The whole model on one rank; as a `Decoder` it is the half that generates.

    Attributes:
        encoder: the layers of the other half.
    """

    base_prefix = "model."
    own_fields = ("is_encoder_decoder",)
    layers: list[_CrossLayer]

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        check_plain_attention(config)
        require(config, "tie_word_embeddings", True, True)
        if config.head_dim % _HEAD_DIM_STEP:
            supported = f"multiples of {_HEAD_DIM_STEP}"
            raise unsupported(config, "d_model / attention heads", config.head_dim, supported)
        assert config.encoder is not None, "a model with two halves has it"
        family, prefix = _family(config), f"{self.base_prefix}encoder"
        self._encoder_ends = _Ends(config, weights, prefix, config.encoder.max_len)
        encoder_layer = DecoderLayer if family.norms_before else NormsAfter
        self.encoder = [
            encoder_layer(*_parts(config, weights, f"{prefix}.layers.{i}", "encoder"))
            for i in range(config.encoder.num_layers)
        ]
        prefix = f"{self.base_prefix}decoder"
        self._ends = _Ends(config, weights, prefix, config.hf_config["max_position_embeddings"])
        decoder_layer = _CrossLayer if family.norms_before else _CrossNormsAfter
        self.through_layers(
            config, weights, lambda i: decoder_layer(config, weights, f"{prefix}.layers.{i}")
        )
        self.norm = self._ends.last_norm

    def complete(
        self, absent: dict[str, Tensor], tensors: Iterator[CheckpointTensor]
    ) -> Iterator[CheckpointTensor]:
        """Adds what a checkpoint may leave out; see `Weights.convert`.

        Args:
            absent: it, by name.
        """
        for file, name, source in tensors:
            for stored in (name, f"{self.base_prefix}{name}"):
                absent.pop(stored, None)
            yield file, name, source
        for name, tensor in absent.items():
            yield "", name, LoadedTensor(tensor)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder.embed`."""
        return None, self._ends.embed(self.embed_tokens.forward(token_ids), positions)

    def read(self, prompts: Tensor) -> Tensor:
        """Embeds what the encoder reads, without positions.

        Args:
            prompts: see `worker.encoder_pass.TwoHalves.encode`.

        Returns:
            `[num_tokens, hidden_size]`.
        """
        return self.embed_tokens.forward(prompts)

    def encode(
        self, prompts: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> None:
        """See `worker.encoder_pass.TwoHalves`."""
        caches = list(kv_caches)
        step = LayerStep(caches[0], metadata, None)
        x, states = None, self._encoder_ends.embed(self.read(prompts), metadata.positions)
        for layer in self.encoder:
            x, states = layer.forward(x, states, step)
        states = self._encoder_ends.last_norm.add_forward(x, states)
        for decoder_layer, kv_cache in zip(self.layers, caches, strict=True):
            decoder_layer.cross.write(states, kv_cache, metadata)


class BartForConditionalGeneration(EncoderDecoder):
    """A model of text."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        require(config, "share_encoder_decoder_embeddings", True, True)
        hf, size, name = config.hf_config, config.hidden_size, f"{self.base_prefix}shared"
        scale = math.sqrt(size) if hf["scale_embedding"] else 1.0
        self.embed_tokens = VocabParallelEmbedding(weights, name, config.vocab_size, size, scale)
        for half in ("encoder", "decoder"):
            for base in (self.base_prefix, ""):
                weights.declare_repeat(f"{base}{half}.embed_tokens.weight", f"{name}.weight")
        self.lm_head = self.make_head(config, weights)
        self._bias = weights.replicated(_BIAS, 1, config.vocab_size)
        absent = {_BIAS: torch.zeros_like(self._bias)}  # a bare model does not have it
        if _family(config).is_sinusoidal:
            sines = _sines(hf["max_position_embeddings"], size)
            for half in ("encoder", "decoder"):
                absent[f"{self.base_prefix}{half}.embed_positions.weight"] = sines
        weights.convert = partial(self.complete, absent)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.compute_logits`."""
        return super().compute_logits(hidden) + self._bias
