"""What encoders have in common: a head for classes, or none, in the place of one for tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

from tpengine.config import ModelConfig
from tpengine.layers.pooling import LayersHead, PoolingHead, embedding_head
from tpengine.layers.weights import CheckpointTensor, Weights
from tpengine.models.decoder import Decoder


class Encoder(Decoder):
    """The whole model on one rank, or the layers of a pipeline stage; each token sees those before
    and after it.

    Attributes:
        heads: beginnings of the names in a checkpoint of heads, which this model may not have.
    """

    heads: ClassVar[tuple[str, ...]]

    def make_pooling_head(self, config: ModelConfig, weights: Weights) -> PoolingHead:
        """Makes what stands behind the pooling; tensors of other heads are not read."""
        weights.convert = partial(self._convert, weights)
        assert config.pooling is not None, "an encoder makes no tokens"
        if not config.pooling.labels:
            return embedding_head(config, weights)
        return LayersHead(self.classifier(config, weights, len(config.pooling.labels)))

    def classifier(
        self, config: ModelConfig, weights: Weights, num_labels: int
    ) -> Sequence[PoolingHead]:
        """Makes the layers of the head for classes."""
        raise NotImplementedError

    def _convert(
        self, weights: Weights, tensors: Iterator[CheckpointTensor]
    ) -> Iterator[CheckpointTensor]:
        """Leaves out heads that the model does not have, and gives norms their present names."""
        for file, name, source in tensors:
            for old, new in (("gamma", "weight"), ("beta", "bias")):
                if name.endswith(f".LayerNorm.{old}"):
                    name = name.removesuffix(old) + new
            if not name.startswith(self.heads) or name in weights.shards:
                yield file, name, source
