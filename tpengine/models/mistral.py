"""Mistral (https://arxiv.org/abs/2310.06825), a Llama with an optional sliding window, the same for
all layers; Ministral, with a window for each layer; Mixtral (https://arxiv.org/abs/2401.04088), a
Mistral with experts in place of each MLP.
"""

from __future__ import annotations

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.moe import Experts, ExpertTraits
from tpengine.models.decoder import MLP
from tpengine.models.llama import Blueprint, LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import layer_windows, require, uniform_window


class MistralForCausalLM(LlamaForCausalLM):
    """The window of all layers is `sliding_window`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "attention_bias", False, False)
        return LlamaTraits(windows=uniform_window(config))


class MinistralForCausalLM(LlamaForCausalLM):
    """`layer_types` says which layers have the window."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "attention_bias", False, False)
        return LlamaTraits(windows=layer_windows(config))


class ExpertMLP:
    """Experts, and the sum over ranks.

    Args:
        traits: of the experts.
    """

    def __init__(self, blueprint: Blueprint, prefix: str, traits: ExpertTraits) -> None:
        require(blueprint.config, "hidden_act", "silu", "silu", "swish")
        self._parallel = blueprint.weights.parallel
        self.experts = Experts(blueprint.weights, prefix, traits)

    def forward(self, x: Tensor) -> Tensor:
        """x `[num_tokens, hidden_size]` to the same shape."""
        return self._parallel.all_reduce(self.experts.forward(x))


class MixtralForCausalLM(MistralForCausalLM):
    """Every layer has experts; the weights of a token's experts are normalised."""

    own_fields = ("num_experts", "num_local_experts")

    @classmethod
    def make_mlp(cls, blueprint: Blueprint, layer: int) -> MLP:
        """See `LlamaForCausalLM.make_mlp`."""
        hf = blueprint.config.hf_config
        experts = ExpertTraits(
            num_experts=hf["num_local_experts"],
            top_k=hf["num_experts_per_tok"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            normalize=True,
            names=("w1", "w3", "w2"),
        )
        return ExpertMLP(blueprint, f"model.layers.{layer}.block_sparse_moe", experts)
