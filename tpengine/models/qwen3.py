"""Qwen3, dense (https://arxiv.org/abs/2505.09388): a Llama with normalised query and key heads, and
a head_dim that is independent of the hidden size."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import layer_windows, require


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`layer_types` gives the windows, as in Qwen2, and `attention_bias` the biases."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "mlp_bias", False, False)
        bias = bool(config.hf_config.get("attention_bias"))
        return LlamaTraits(windows=layer_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)
