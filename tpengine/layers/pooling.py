"""What stands behind the last layer of a model that embeds, scores or classifies.

A head takes hidden states that stand for prompts, `[num_rows, hidden_size]`, and returns outputs,
`[num_rows, num_outputs]`. Every rank has the whole head, in the model's dtype. The driver
normalises the outputs or makes probabilities of them, as requests ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.weights import Weights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


class PoolingHead(Protocol):
    """What makes outputs of hidden states that stand for prompts."""

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_rows, hidden_size]` to `[num_rows, num_outputs]`."""


@dataclass(frozen=True, eq=False)
class Dense:
    """A linear layer with an activation.

    Attributes:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
    """

    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def declared(
        cls,
        weights: Weights,
        name: str,
        in_features: int,
        out_features: int,
        activation: str = "identity",
        bias: bool = True,
    ) -> Dense:
        """Declares its parameters under the checkpoint's name."""
        weight = weights.replicated(f"{name}.weight", out_features, in_features)
        own_bias = weights.replicated(f"{name}.bias", out_features) if bias else None
        return cls(weight, own_bias, ACTIVATIONS[activation])

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_rows, in_features]` to `[num_rows, out_features]`, in the dtype of the weight."""
        return self.activation(F.linear(x.to(self.weight.dtype), self.weight, self.bias))


@dataclass(frozen=True, eq=False)
class LayersHead:
    """Layers one behind the other; without any the outputs are the hidden states."""

    layers: Sequence[PoolingHead] = ()

    def forward(self, x: Tensor) -> Tensor:
        """See `PoolingHead.forward`."""
        for layer in self.layers:
            x = layer.forward(x)
        return x


def decoder_head(config: ModelConfig, weights: Weights) -> PoolingHead:
    """Makes the head of a model whose tokens see only earlier ones: for classes or a score one
    layer without bias."""
    assert config.pooling is not None
    if num_labels := len(config.pooling.labels):
        return Dense.declared(weights, "score", config.hidden_size, num_labels, bias=False)
    return embedding_head(config, weights)


def embedding_head(config: ModelConfig, weights: Weights) -> LayersHead:
    """Makes the head of an embedding model: the layers that its folder has behind the pooling. The
    loader reads them from folders of their own."""
    assert config.pooling is not None
    layers = []
    for dense in config.pooling.dense:
        name, sizes = f"{dense.folder}/linear", (dense.in_features, dense.out_features)
        layers.append(Dense.declared(weights, name, *sizes, dense.activation, dense.bias))
    return LayersHead(layers)
