"""Reading a model's `config.json`: what it asks for and we do not do is refused by name and value.

A field that is silently passed over is a model that silently answers wrong.
"""

from __future__ import annotations

from typing import Any

from tpengine.config import ModelConfig
from tpengine.errors import ConfigError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "attention_sinks": (None, False),
    "num_sink_tokens": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
"""Fields that change what a model computes, in no family here, and the values that do not."""


def refuse_foreign_fields(config: ModelConfig) -> None:
    """Checks the fields that no family supports.

    Raises:
        ConfigError: one of them is set.
    """
    for field, neutral in _NEUTRAL.items():
        require(config, field, None, *neutral)


def require(config: ModelConfig, field: str, default: Any, *supported: Any) -> Any:
    """Returns `field` of the model's configuration; `default` where it is absent or null.

    Raises:
        ConfigError: its value is none of `supported`.
    """
    value = config.hf_config.get(field)
    if value is None:
        value = default
    if value not in supported:
        raise unsupported(config, field, value, ", ".join(repr(one) for one in supported))
    return value


def unsupported(config: ModelConfig, field: str, value: object, supported: str) -> ConfigError:
    """An error for a field that this architecture does not support."""
    return ConfigError(
        f"{field} = {value!r} in the config.json of {config.model} is not supported for "
        f"{config.architecture}; supported: {supported}"
    )


def check_heads_fill_hidden_size(config: ModelConfig) -> None:
    """Makes sure that heads divide the hidden size, for families that have no head_dim.

    Raises:
        ConfigError: they do not.
    """
    hidden_size, heads = config.hf_config["hidden_size"], config.total_num_heads
    if config.head_dim * heads != hidden_size:
        raise unsupported(config, "hidden_size", hidden_size, f"multiples of {heads} heads")


def layer_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The sliding window of every layer by `layer_types` and `sliding_window`; None: sees all.

    Raises:
        ConfigError: a type that is not supported, or a sliding layer without a window.
    """
    types = config.hf_config.get("layer_types")
    if not isinstance(types, list) or len(types) != config.num_layers:
        raise unsupported(config, "layer_types", types, f"a list of {config.num_layers} types")
    windows: list[int | None] = []
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise unsupported(config, "layer_types", kind, "full_attention, sliding_attention")
        windows.append(_window(config) if kind == "sliding_attention" else None)
    return tuple(windows)


def uniform_window(config: ModelConfig) -> tuple[int | None, ...]:
    """One window for every layer, by `sliding_window` alone; null: all see everything.

    Raises:
        ConfigError: `layer_types` is there too and says something else.
    """
    window = None if config.hf_config.get("sliding_window") is None else _window(config)
    windows = (window,) * config.num_layers
    types = config.hf_config.get("layer_types")
    if types is not None and layer_windows(config) != windows:
        raise unsupported(
            config, "layer_types", types, "one type for all layers (MinistralForCausalLM has more)"
        )
    return windows


def _window(config: ModelConfig) -> int:
    window = config.hf_config.get("sliding_window")
    if not isinstance(window, int) or window < 1:
        raise unsupported(config, "sliding_window", window, "integers from 1 for sliding layers")
    return window
