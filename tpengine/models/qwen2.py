"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): a Llama with biases on q, k and v; in some
sizes the upper layers have a sliding window."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import layer_windows, require


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`layer_types` says which layers have the window; if a config.json lacks it, transformers
    computes it from `use_sliding_window` and `max_window_layers`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "qkv_bias", True, True)
        require(config, "mlp_bias", False, False)
        require(config, "use_mrope", False, False)
        require(config, "dual_chunk_attention_config", None, None)
        return LlamaTraits(windows=layer_windows(config), qkv_bias=True)
