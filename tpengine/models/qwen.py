"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): a Llama with biases on q, k and v; some
sizes have a sliding window in the upper layers. Qwen3, dense (https://arxiv.org/abs/2505.09388): a
Llama with normalised query and key heads, and a head_dim that is independent of the hidden size.
"""

from __future__ import annotations

from dataclasses import replace

from tpengine.config import ModelConfig
from tpengine.layers.norm import QKNorm
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


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`layer_types` gives the windows, as in Qwen2, and `attention_bias` the biases."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "mlp_bias", False, False)
        return replace(cls.biases(config), windows=layer_windows(config), qk_norm=QKNorm)
