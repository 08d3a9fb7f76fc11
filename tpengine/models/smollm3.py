"""SmolLM3 (https://huggingface.co/blog/smollm3): a Llama of which some layers do not rotate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.models.llama import Blueprint, LlamaForCausalLM, LlamaTraits
from tpengine.models.registry import layer_windows, unsupported


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """`no_rope_layers` has a 1 for each layer that rotates, and a 0 for each that does not;
    `layer_types` says which layers have the window."""

    @classmethod
    def traits(cls, config: ModelConfig) -> LlamaTraits:
        """See `LlamaForCausalLM.traits`."""
        mlp_bias = bool(config.hf_config.get("mlp_bias"))
        return replace(cls.biases(config), windows=layer_windows(config), mlp_bias=mlp_bias)

    @classmethod
    def rotary_tables(cls, blueprint: Blueprint) -> Sequence[Tensor | None]:
        """See `LlamaForCausalLM.rotary_tables`."""
        config = blueprint.config
        rotates = config.hf_config["no_rope_layers"]
        if len(rotates) < config.num_layers:
            lengths = f"lists of {config.num_layers} numbers"
            raise unsupported(config, "no_rope_layers", rotates, lengths)
        tables = super().rotary_tables(blueprint)
        return [table if is_one else None for table, is_one in zip(tables, rotates, strict=False)]
