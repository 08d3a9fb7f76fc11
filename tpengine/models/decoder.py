"""What every family is made of: layers of attention and MLP on a residual, a norm, an output head.

The residual is a tensor of its own. A layer returns its output without adding it, because the norm
that comes next adds and normalises in one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.activation import gated_activation, plain_activation
from tpengine.layers.attention import AttentionMetadata, KVCache, LayerStep, SelfAttention
from tpengine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tpengine.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from tpengine.layers.norm import NoNorm, Norm
from tpengine.layers.pooling import PoolingHead, decoder_head
from tpengine.layers.weights import Weights

Hidden = tuple[Tensor | None, Tensor]
"""What stands between layers: x, or None if nothing is to be added, and the residual; both
`[num_tokens, hidden_size]`."""


class MLP(Protocol):
    """What follows the attention of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, hidden_size]` to the same shape, summed over ranks."""


class PlainMLP:
    """`down(act(up(x)))`, without a gate.

    Args:
        up, down: prefixes of the two matrices in the checkpoint.
        activation: name of the activation in the configuration.
    """

    def __init__(
        self,
        weights: Weights,
        up: str,
        down: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool = True,
    ) -> None:
        self.up = MergedColumnParallelLinear(weights, [up], hidden_size, [intermediate_size], bias)
        self.activation = plain_activation(activation)
        self.down = RowParallelLinear(weights, down, intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, hidden_size]` to the same shape."""
        up = self.up.forward(x)
        self.activation(up)
        return self.down.forward(up)


class GatedMLP:
    """`down(act(gate(x)) * up(x))`.

    Args:
        names: prefixes of gate and up in the checkpoint; the same one if one tensor has both.
        down: prefix of the third matrix.
        activation: name of the activation in the configuration.
    """

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        down: str,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool,
    ) -> None:
        sizes = [intermediate_size] * 2
        self.gate_up = MergedColumnParallelLinear(weights, names, hidden_size, sizes, bias)
        self.activation = gated_activation(activation)
        self.down = RowParallelLinear(weights, down, intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, hidden_size]` to the same shape."""
        return self.down.forward(self.activation(self.gate_up.forward(x)))


_NONE = NoNorm()


@dataclass(frozen=True)
class Norms:
    """Norms of what attention and MLP get, and of what they give before it is added."""

    before_attention: Norm = _NONE
    after_attention: Norm = _NONE
    before_mlp: Norm = _NONE
    after_mlp: Norm = _NONE


@dataclass(eq=False)
class DecoderLayer:
    """One layer."""

    attention: SelfAttention
    mlp: MLP
    norms: Norms

    def forward(self, x: Tensor | None, residual: Tensor, step: LayerStep) -> Hidden:
        """Adds x to `residual` in place, then computes the layer.

        Args:
            x: output of the layer before, `[num_tokens, hidden_size]`; None: nothing is added.
            residual: `[num_tokens, hidden_size]`, overwritten.

        Returns:
            The layer's output, and the residual to which the next layer adds it; both
            `[num_kept, hidden_size]`, see `LayerStep`.
        """
        norms = self.norms
        normed = norms.before_attention.add_forward(x, residual)
        attended = self.attention.forward(normed, step)
        residual = step.keep(residual)
        normed = norms.before_mlp.add_forward(norms.after_attention.forward(attended), residual)
        return norms.after_mlp.forward(self.mlp.forward(normed)), residual


class Decoder:
    """The whole model on one rank, or the layers of a pipeline stage, see `registry.CausalLM`. A
    subclass builds its parts: what stands before the layers in `weights.held(stage.is_first)`, the
    layers by `through_layers`, what stands behind them in `weights.held(stage.is_last)`.

    Attributes:
        embed_tokens: of the vocabulary.
        norm: of the last layer's output.
        stage: which layers it has.
    """

    ignored_weights: tuple[str, ...] = ()
    base_prefix: ClassVar[str]
    recordable: ClassVar[bool] = True
    embed_tokens: VocabParallelEmbedding
    layers: Sequence[DecoderLayer]
    norm: Norm
    lm_head: ParallelLMHead | PoolingHead

    def through_layers(
        self, config: ModelConfig, weights: Weights, make: Callable[[int], DecoderLayer]
    ) -> None:
        """Makes the layers that this stage holds; see `Weights.through_layers`."""
        self.stage = weights.parallel.stage
        self.layers = weights.through_layers(config.num_layers, make)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Hidden:
        """Returns what the first layer takes: x and the residual, see `DecoderLayer.forward`.

        Args:
            token_ids, positions: int32 `[num_tokens]`.
        """
        return None, self.embed_tokens.forward(token_ids)

    @property
    def rotary_table(self) -> Tensor | None:
        """The table of `layers.rotary` that the first layer has; None: it does not rotate."""
        return self.layers[0].attention.attention.cos_sin_cache

    def forward(
        self,
        token_ids: Tensor,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `registry.CausalLM.forward`."""
        x, residual = None, hidden
        if residual is None:
            x, residual = self.embed(token_ids, metadata.positions)
        last, pictures = len(self.layers) - 1, metadata.pictures
        for i, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            step = LayerStep(kv_cache, metadata, metadata.wanted_rows if i == last else None)
            x, residual = layer.forward(x, residual, step)
            if pictures is not None and i < len(pictures.added):  # on the first stage
                assert x is not None, "a layer has an output"
                x.index_add_(0, pictures.rows, pictures.added[i])
        norm = self.norm if self.stage.is_last else _NONE  # else the sum goes on to the next stage
        return norm.add_forward(x, residual)

    def make_head(
        self, config: ModelConfig, weights: Weights, name: str = "lm_head", is_tied: bool = True
    ) -> ParallelLMHead | PoolingHead:
        """Makes the output head, with the table of `embed_tokens` if `tie_word_embeddings` says so;
        or, of a model that embeds, scores or classifies, what makes its outputs.

        Args:
            is_tied: what a config.json without that field means.
        """
        pooling = config.pooling
        if pooling is not None and not pooling.choice_ids:
            self.ignored_weights = (*self.ignored_weights, f"{name}.weight", "lm_head.weight")
            return decoder_head(config, weights)
        is_tied = config.hf_config.get("tie_word_embeddings", is_tied)
        tied = self.embed_tokens if is_tied else None
        return ParallelLMHead(weights, name, *self.embed_tokens.shape, tied)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden `[num_rows, hidden_size]` to logits `[num_rows, vocab_size]`."""
        return self.lm_head.forward(hidden)

    def compute_outputs(self, pooled: Tensor) -> Tensor:
        """See `registry.CausalLM.compute_outputs`."""
        return self.lm_head.forward(pooled)
