"""Mistral (https://arxiv.org/abs/2310.06825), a Llama with an optional sliding window, the same for
all layers, and Ministral, with a window for each layer."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import layer_windows, require, uniform_window


class MistralForCausalLM(LlamaForCausalLM):
    """The window of all layers is `sliding_window`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        _refuse_biases(config)
        return LlamaTraits(windows=uniform_window(config))


class MinistralForCausalLM(LlamaForCausalLM):
    """`layer_types` says which layers have the window."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        _refuse_biases(config)
        return LlamaTraits(windows=layer_windows(config))


def _refuse_biases(config: ModelConfig) -> None:
    require(config, "attention_bias", False, False)
    require(config, "mlp_bias", False, False)
