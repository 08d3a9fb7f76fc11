"""Qwen3, dense (https://arxiv.org/abs/2505.09388): a Llama with normalised query and key heads,
whose head_dim does not follow from the hidden size."""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.models.hf_fields import layer_windows, require
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Windows by `layer_types`, as in Qwen2; biases by `attention_bias`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "mlp_bias", False, False)
        bias = bool(config.hf_config.get("attention_bias"))
        return LlamaTraits(windows=layer_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)
