"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, dense (https://arxiv.org/abs/2404.14219): a Llama whose
checkpoint has fused projections, with an optional window and, in the long models, LongRoPE."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.layers.rotary import rope_parameters
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import require, uniform_window, unsupported

_ROPE_TYPES = ("default", "longrope", "su")


class Phi3ForCausalLM(LlamaForCausalLM):
    """The window of all layers is `sliding_window`. Phi-4-mini rotates a part of each head
    (`partial_rotary_factor`)."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "attention_bias", False, False)
        kind = rope_parameters(config.hf_config)["rope_type"]
        if kind not in _ROPE_TYPES:  # transformers reads "yarn" as longrope
            raise unsupported(config, "rope_type", kind, ", ".join(_ROPE_TYPES))
        return LlamaTraits(windows=uniform_window(config), fused=True, partial_rotary=True)
