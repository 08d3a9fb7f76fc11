"""OLMo 2 (https://arxiv.org/abs/2501.00656): a Llama that normalises what attention and MLP give
instead of what they get, and queries and keys of all heads together."""

from __future__ import annotations

from dataclasses import replace

from tpengine.config import ModelConfig
from tpengine.layers.norm import WholeQKNorm
from tpengine.models.llama import LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import require

_POST_NORMS = (
    ("after_attention", "post_attention_layernorm"),
    ("after_mlp", "post_feedforward_layernorm"),
)


class Olmo2ForCausalLM(LlamaForCausalLM):
    """`attention_bias` gives the biases."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "sliding_window", None, None)
        return replace(cls.biases(config), norms=_POST_NORMS, qk_norm=WholeQKNorm)
