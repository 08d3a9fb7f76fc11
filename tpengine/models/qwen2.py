"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): a Llama with biases on q, k and v, and in
some sizes a window on the upper layers."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.hf_fields import layer_windows, require
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`layer_types` follows from `use_sliding_window` and `max_window_layers` where a config does
    not name it; transformers fills it in."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "qkv_bias", True, True)
        require(config, "mlp_bias", False, False)
        require(config, "use_mrope", False, False)
        require(config, "dual_chunk_attention_config", None, None)
        return LlamaTraits(windows=layer_windows(config), qkv_bias=True)
