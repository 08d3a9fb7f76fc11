"""Mistral (https://arxiv.org/abs/2310.06825), a Llama whose layers may see a window only, and
Ministral, whose layers differ in that."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.hf_fields import layer_windows, require, uniform_window
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits


class MistralForCausalLM(LlamaForCausalLM):
    """One window for all layers, by `sliding_window`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        _refuse_biases(config)
        return LlamaTraits(windows=uniform_window(config))


class MinistralForCausalLM(LlamaForCausalLM):
    """A window per layer, by `layer_types`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        _refuse_biases(config)
        return LlamaTraits(windows=layer_windows(config))


def _refuse_biases(config: ModelConfig) -> None:
    require(config, "attention_bias", False, False)
    require(config, "mlp_bias", False, False)
