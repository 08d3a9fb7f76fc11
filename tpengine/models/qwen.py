"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): a Llama with biases on q, k and v; some
sizes have a sliding window in the upper layers. Qwen3 (https://arxiv.org/abs/2505.09388): a Llama
with normalised query and key heads, and a head_dim that is independent of the hidden size.

Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE have experts in place of the MLPs of some or all layers; those
of the second generation also one shared expert that every token goes to.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.moe import ExpertTraits, Router
from tpengine.layers.norm import QKNorm
from tpengine.models.decoder import MLP
from tpengine.models.llama import Blueprint, LlamaForCausalLM, LlamaMLP, LlamaTraits
from tpengine.models.mistral import ExpertMLP
from tpengine.models.registry import layer_windows, require, uniform_window
from tpengine.ops.fused_ops import add_gated


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`layer_types` says which layers have the window; if a config.json lacks it, transformers
    computes it from `use_sliding_window` and `max_window_layers`."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        require(config, "qkv_bias", True, True)
        return LlamaTraits(windows=layer_windows(config), qkv_bias=True)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`layer_types` gives the windows, as in Qwen2, and `attention_bias` the biases."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        return replace(cls.biases(config), windows=layer_windows(config), qk_norm=QKNorm)


class SharedExpertMLP(ExpertMLP):
    """Experts, and one that every token goes to, weighed by a sigmoid."""

    def __init__(self, blueprint: Blueprint, prefix: str, traits: ExpertTraits) -> None:
        super().__init__(blueprint, prefix, traits)
        size = blueprint.config.hf_config["shared_expert_intermediate_size"]
        plain = blueprint._replace(traits=LlamaTraits(windows=()))
        self.shared_expert = LlamaMLP(plain, f"{prefix}.shared_expert", size)
        gate = f"{prefix}.shared_expert_gate"
        self.shared_expert_gate = Router(blueprint.weights, gate, traits.hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See `ExpertMLP.forward`."""
        out = self.experts.forward(x)
        add_gated(out, self.shared_expert.partial_forward(x), self.shared_expert_gate.forward(x))
        return self._parallel.all_reduce(out)


class _QwenMoeForCausalLM(LlamaForCausalLM):
    """What both generations share: which layers have experts."""

    own_fields = ("num_experts", "num_local_experts")
    expert_mlp = ExpertMLP

    @classmethod
    def make_mlp(cls, blueprint: Blueprint, layer: int) -> MLP:
        """See `LlamaForCausalLM.make_mlp`."""
        hf = blueprint.config.hf_config
        is_dense = layer in (hf.get("mlp_only_layers") or ())
        num_experts = hf.get("num_experts") or hf.get("num_local_experts")
        if is_dense or not num_experts or (layer + 1) % (hf.get("decoder_sparse_step") or 1):
            return super().make_mlp(blueprint, layer)
        experts = ExpertTraits(
            num_experts=num_experts,
            top_k=hf["num_experts_per_tok"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["moe_intermediate_size"],
            normalize=bool(hf.get("norm_topk_prob")),
        )
        return cls.expert_mlp(blueprint, f"model.layers.{layer}.mlp", experts)


class Qwen2MoeForCausalLM(_QwenMoeForCausalLM):
    """`layer_types` says which layers have the window, if `use_sliding_window` is set."""

    expert_mlp = SharedExpertMLP

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        uses_window = bool(config.hf_config.get("use_sliding_window"))
        return LlamaTraits(
            windows=layer_windows(config) if uses_window else (None,) * config.num_layers,
            qkv_bias=require(config, "qkv_bias", True, True, False),
        )


class Qwen3MoeForCausalLM(_QwenMoeForCausalLM):
    """The window of all layers is `sliding_window`; `attention_bias` gives the biases."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        return replace(cls.biases(config), windows=uniform_window(config), qk_norm=QKNorm)
