"""Granite 3, dense (https://github.com/ibm-granite/granite-3.0-language-models): a Llama with
factors on embeddings, attention, what a layer adds, and logits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.weights import Weights
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import unsupported


class GraniteForCausalLM(LlamaForCausalLM):
    """`attention_multiplier` takes the place of `head_dim**-0.5`."""

    own_fields = (
        *("attention_multiplier", "embedding_multiplier"),
        *("logits_scaling", "residual_multiplier"),
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.logits_scaling = _factor(config, "logits_scaling")
        # The residual is kept divided by residual_multiplier, see `LlamaTraits.residual_scale`.
        scale = _factor(config, "embedding_multiplier") / _factor(config, "residual_multiplier")
        self.embed_tokens.scale = scale

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        return replace(
            super().traits(config),
            scale=_factor(config, "attention_multiplier"),
            residual_scale=_factor(config, "residual_multiplier"),
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.compute_logits`."""
        return super().compute_logits(hidden).div_(self.logits_scaling)


def _factor(config: ModelConfig, field: str) -> float:
    value = config.hf_config[field]
    if not value > 0:
        raise unsupported(config, field, value, "numbers above 0")
    return float(value)
