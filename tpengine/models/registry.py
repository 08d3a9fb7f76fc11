"""Which class runs which architecture. A family is one file and one line here."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from tpengine.config import ModelConfig
from tpengine.errors import ConfigError
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.weights import Weights
from tpengine.models.hf_fields import refuse_foreign_fields, unsupported
from tpengine.ops.library import has_cpu_kernels

_MODELS = {
    "BloomForCausalLM": "tpengine.models.bloom:BloomForCausalLM",
    "LlamaForCausalLM": "tpengine.models.llama:LlamaForCausalLM",
    "MinistralForCausalLM": "tpengine.models.mistral:MinistralForCausalLM",
    "MistralForCausalLM": "tpengine.models.mistral:MistralForCausalLM",
    "OPTForCausalLM": "tpengine.models.opt:OPTForCausalLM",
    "Qwen2ForCausalLM": "tpengine.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "tpengine.models.qwen3:Qwen3ForCausalLM",
}


class CausalLM(Protocol):
    """What the model runner and the loader need of a model.

    Attributes:
        ignored_weights: endings of checkpoint names that are not loaded (computed, or left over).
        base_prefix: start of the names that a checkpoint of the bare model, without its output
            head, leaves out.
    """

    ignored_weights: tuple[str, ...]
    base_prefix: str

    def forward(
        self, token_ids: torch.Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def build_model(config: ModelConfig, weights: Weights) -> CausalLM:
    """Builds the model that `config` names, its parameters allocated and declared in `weights`.

    Raises:
        ConfigError: the architecture is not supported, or its configuration asks for something
            that is not.
    """
    target = _MODELS.get(config.architecture)
    if target is None:
        raise ConfigError(
            f"architecture {config.architecture!r} of {config.model} is not supported; "
            f"supported: {', '.join(sorted(_MODELS))}"
        )
    refuse_foreign_fields(config)
    _check_head_dim(config, weights)
    module, name = target.split(":")
    model: Any = getattr(importlib.import_module(module), name)(config, weights)
    return model  # type: ignore[no-any-return]


def _check_head_dim(config: ModelConfig, weights: Weights) -> None:
    compiled = weights.device.type == "cpu" and has_cpu_kernels()
    if compiled and (config.head_dim % 16 or config.head_dim > 256):
        raise unsupported(config, "head_dim", config.head_dim, "multiples of 16 up to 256 on CPU")
