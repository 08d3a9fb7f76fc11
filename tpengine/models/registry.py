"""Which class runs which architecture. A family is one file and one line here."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from tpengine.config import ModelConfig
from tpengine.errors import ConfigError
from tpengine.layers.attention import AttentionMetadata, KVCache
from tpengine.layers.weights import Weights

_MODELS = {
    "LlamaForCausalLM": "tpengine.models.llama:LlamaForCausalLM",
}


class CausalLM(Protocol):
    """What the model runner needs of a model."""

    ignored_weights: tuple[str, ...]

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
    module, name = target.split(":")
    model: Any = getattr(importlib.import_module(module), name)(config, weights)
    return model  # type: ignore[no-any-return]
