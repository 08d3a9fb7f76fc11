"""What a model's `config.json` allows: numbers of ranks and stages, lengths, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpengine.config import architecture_of, first_position
from tpengine.errors import ConfigError, counted

_LONGEST = 1 << 21
"""Most positions that are believed of a model's files: memory grows with them."""


def check_division(
    hf_config: Mapping[str, Any], size: int, implementation: str, asked: str = ""
) -> None:
    """Checks that `size` ranks can share the model: heads are divided; of fewer KV heads than
    ranks, each is on several ranks, but not in transformers' code. Other sizes are padded.

    Args:
        implementation: tpengine or transformers.
        asked: the option that allows this size, for the message, if it is not its own.

    Raises:
        ConfigError: they cannot; the message names the sizes that can. Or KV heads do not divide
            the heads.
    """
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads") or heads
    if not (isinstance(heads, int) and isinstance(kv_heads, int)) or size < 1:
        return  # the check of the options refuses such a size
    is_own = implementation == "tpengine"
    if is_own and heads % kv_heads:
        text = f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        raise ConfigError(f"{text}; correct the model's config.json")

    def divides(number: int) -> bool:
        shares_kv = kv_heads % number == 0 or (is_own and number % kv_heads == 0)
        return shares_kv and heads % number == 0

    if not divides(size):
        sizes = ", ".join(str(number) for number in range(1, heads + 1) if divides(number))
        text = f"{heads} attention heads and {kv_heads} KV heads cannot be divided over"
        asked = f"{size} ranks of {asked}" if asked else f"tensor_parallel_size = {size}"
        raise ConfigError(f"{text} {asked}; sizes that can: {sizes}")


def check_stages(
    hf_config: Mapping[str, Any], count: int, partition: Sequence[int] | None, implementation: str
) -> None:
    """Checks that a model's layers can be divided into `count` pipeline stages.

    Args:
        partition: number of layers of each; None: they are divided by cost.
        implementation: tpengine or transformers.

    Raises:
        ConfigError: they cannot.
    """
    if count == 1 and partition is None:
        return
    name = f"pipeline_parallel_size = {count}"
    if implementation != "tpengine":
        text = f"{name} needs tpengine's own code, and {architecture_of(hf_config)} runs"
        hint = "use tensor_parallel_size, or leave model_impl out if it is set"
        raise ConfigError(f"{text} transformers' code; {hint}")
    num_layers = hf_config.get("num_hidden_layers")
    if isinstance(num_layers, int) and count > num_layers:
        raise ConfigError(f"{name} is more than the {num_layers} layers of the model; lower it")
    if partition is not None and (len(partition) != count or sum(partition) != num_layers):
        got = f"pp_layer_partition = {','.join(map(str, partition))} gives {sum(partition)} layers"
        got = f"{got} to {counted(len(partition), 'stage')}, and the model has {num_layers} layers"
        raise ConfigError(f"{got} and {name}; give one number for each stage, of all layers")


def replace_rope(
    hf_config: dict[str, Any], scaling: Mapping[str, Any] | None, theta: float | None
) -> None:
    """Replaces the rotary scaling and the rotary base of a model's configuration.

    Raises:
        ConfigError: the model has no rotary positions, or not the same in all layers.
    """
    if scaling is None and theta is None:
        return
    asked = f"rope_scaling = {scaling}, rope_theta = {theta}"
    architecture = architecture_of(hf_config)
    if "rope_parameters" not in hf_config and "rope_theta" not in hf_config:
        raise ConfigError(f"{asked}: {architecture} has no rotary positions; leave them unset")
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        hint = "change rope_parameters in its config.json"
        raise ConfigError(f"{asked}: the layers of {architecture} rotate differently; {hint}")
    if scaling is not None:
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        rope = kept | dict(scaling)
    hf_config["rope_parameters"] = rope if theta is None else rope | {"rope_theta": theta}


def resolve_max_model_len(
    hf_config: Mapping[str, Any], wanted: int | None, disable_sliding_window: bool = False
) -> int:
    """Returns the length that the user wants, or the model's.

    Args:
        disable_sliding_window: limit the length to the window, so that layers with a window see all
            tokens.

    Raises:
        ConfigError: the user wants more than the limit.
    """
    window = hf_config.get("sliding_window") if disable_sliding_window else None
    if window:  # Qwen2-MoE says 0 for none
        if wanted is not None and wanted > window:
            text = f"max_model_len = {wanted} is more than the sliding window of {window} tokens"
            raise ConfigError(f"{text}; choose a smaller one, or leave disable_sliding_window out")
        return min(wanted or window, resolve_max_model_len(hf_config, wanted))
    limit = _num_positions(hf_config)
    if wanted is None:
        if (limit or 0) > _LONGEST:
            text = f"the model names {limit} positions, more than {_LONGEST}; set max_model_len"
            raise ConfigError(text)
        return int(limit or 2048)
    if limit is None:
        return wanted
    if wanted > limit:
        raise ConfigError(
            f"max_model_len = {wanted} is more than the {limit} positions of the model (its "
            "max_position_embeddings, or its original length times the factor of linear or yarn); "
            "choose a smaller one"
        )
    return wanted


def _num_positions(hf_config: Mapping[str, Any]) -> int | None:
    """Number of positions that a model is made for; None: its configuration does not say.

    It is `max_position_embeddings`; or, if that is more, the original length times the factor of
    linear or yarn scaling. The original length is `max_position_embeddings` unless it is named.
    With other kinds of scaling, and in Gemma 3, `max_position_embeddings` is the scaled length.
    """
    longest: int | None = hf_config.get("max_position_embeddings")
    if longest is not None and (first := first_position(hf_config)):
        return longest - first
    scaling = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    name = "original_max_position_embeddings"
    original = scaling.get(name) or hf_config.get(name) or longest
    is_scaled = kind in ("linear", "yarn") and "gemma3" not in str(hf_config.get("model_type"))
    if not (is_scaled and isinstance(original, int) and isinstance(factor, (int, float))):
        return longest
    # A factor that is no number above 0 is refused where the angles are computed.
    return max(longest or 0, int(original * factor)) if factor < math.inf else longest
