"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpengine.errors import ConfigError, not_supported
from tpengine.logger import init_logger

logger = init_logger(__name__)

Parameters = Mapping[str, Any]


def rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary parameters of a config in one form.

    transformers 5 writes `rope_parameters`, which contains `rope_theta`. Earlier versions write
    `rope_theta` and an optional `rope_scaling`, whose kind is in `rope_type` or `type`.

    Returns:
        A dict with at least `rope_type`, `rope_theta`, `partial_rotary_factor` and, where the
        config has them, `max_position_embeddings` and `original_max_position_embeddings`.

    Raises:
        ConfigError: the layers have different parameters, or a token has more than one position.
    """
    parameters = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    for key, value in parameters.items():
        if isinstance(value, Mapping) or key == "mrope_section":
            raise ConfigError(
                f"rope_parameters with {key!r} = {value!r} are not supported: every layer must "
                "rotate alike, by one position per token"
            )
    kind = parameters.pop("type", None)
    parameters["rope_type"] = parameters.get("rope_type") or kind or "default"
    parameters.setdefault("rope_theta", hf_config.get("rope_theta") or 10000.0)
    if parameters.get("partial_rotary_factor") is None:
        fraction = hf_config.get("partial_rotary_factor")
        parameters["partial_rotary_factor"] = 1.0 if fraction is None else fraction
    longest = hf_config.get("max_position_embeddings")
    parameters["max_position_embeddings"] = longest
    if parameters.get("original_max_position_embeddings") is None:
        original = hf_config.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or longest
    return parameters


def build_cos_sin_cache(
    hf_config: Mapping[str, Any], head_dim: int, max_positions: int, device: torch.device
) -> torch.Tensor:
    """Computes the cosines, then the sines, of every position's angles.

    Args:
        max_positions: number of positions, from 0 on.

    Returns:
        float32 `[max_positions, rotary_dim]`.

    Raises:
        ConfigError: the kind of scaling is not supported, or does not reach `max_positions`.
    """
    parameters = {**rope_parameters(hf_config), "num_positions": max_positions}
    kind = parameters["rope_type"]
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise not_supported(f"rope scaling of type {kind!r}", _SCALINGS)
    fraction = _number(parameters, "partial_rotary_factor")
    if fraction > 1:
        raise ConfigError(f"partial_rotary_factor = {fraction} is not supported: it is at most 1")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim == head_dim and head_dim % 2:
        raise ConfigError(f"head_dim = {head_dim} is odd, and heads are rotated by pairs")
    inverse = 1.0 / _powers(rotary_dim, parameters)
    inverse, magnitude = _SCALINGS[kind](inverse, parameters)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
    return torch.cat([angles.cos(), angles.sin()], dim=1).mul_(magnitude).to(device)


def frequency_axes(rope: Parameters, num_frequencies: int) -> torch.Tensor:
    """Returns the axis (time, height, width) whose position turns each frequency, int64
    `[num_frequencies]`, for tokens that have a position on each: in sections that follow each other
    (Qwen2-VL, https://arxiv.org/abs/2409.12191) or alternate (Qwen3-VL)."""
    sections = rope["mrope_section"]
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    for axis in (1, 2):
        if rope.get("mrope_interleaved"):
            axes[axis : 3 * sections[axis] : 3] = axis
        else:
            start = sum(sections[:axis])
            axes[start : start + sections[axis]] = axis
    return axes


def turned_table(table: torch.Tensor, axes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns the cosines and sines of tokens that have a position on each axis, float32
    `[num_tokens, rotary_dim]`.

    Args:
        table: see `build_cos_sin_cache`.
        axes: see `frequency_axes`.
        positions: int64 `[3, num_tokens]`.
    """
    places = positions[axes].t()
    return torch.cat([half.gather(0, places) for half in table.chunk(2, dim=1)], dim=1)


def _powers(rotary_dim: int, parameters: Parameters) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return _number(parameters, "rope_theta") ** exponents


def _number(parameters: Parameters, key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(
            f"rope scaling of type {parameters['rope_type']!r} needs {key} as a number above 0, "
            f"the model's config.json has {value!r}"
        )
    return float(value)


def _dynamic(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Dynamic NTK scaling up to the model's original length; beyond it is refused.

    Beyond that length every further token changes the frequencies of all tokens. Keys in the cache
    were rotated with older frequencies, so the logits would depend on when the context was
    computed. Up to that length the scaling changes nothing, and the result is exact.
    """
    _number(parameters, "factor")
    original = _number(parameters, "max_position_embeddings")
    if parameters["num_positions"] > original:
        raise ConfigError(
            f"rope scaling of type 'dynamic' is supported up to the model's original length of "
            f"{original:.0f} tokens (max_position_embeddings), and max_model_len is "
            f"{parameters['num_positions']}; set max_model_len to {original:.0f}"
        )
    return inverse, 1.0


def _unscaled(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    return inverse, 1.0


def _linear(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Position interpolation (https://arxiv.org/abs/2306.15595)."""
    return inverse / _number(parameters, "factor"), 1.0


def _llama3(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled), 1.0


def _yarn(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071).

    Dimensions that turn more than `beta_fast` times within the original length are kept, those that
    turn less than `beta_slow` times are stretched by `factor`, with a ramp between. Cosines and
    sines are multiplied by the attention factor.
    """
    theta = _number(parameters, "rope_theta")
    original = _number(parameters, "original_max_position_embeddings")
    longest = parameters.get("max_position_embeddings") or original
    factor = _number(parameters, "factor", longest / original)
    half = len(inverse)

    def dimension_with(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = dimension_with(_number(parameters, "beta_fast", 32))
    high = dimension_with(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / width).clamp_(0, 1)
    scaled = inverse / factor * ramp + inverse * (1 - ramp)
    return scaled, _number(parameters, "attention_factor", _yarn_magnitude(parameters, factor))


def _yarn_magnitude(parameters: Parameters, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_all:
        return magnitude(float(weight)) / magnitude(float(weight_all))
    return magnitude(1.0)


def _longrope(inverse: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, float]:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency has a factor of its own.

    A model has short factors for sequences up to its original length, and long ones. Keys in the
    cache cannot be rotated anew when their sequence passes that length, so `max_model_len` decides
    for all sequences.
    """
    original = _number(parameters, "original_max_position_embeddings")
    is_long = parameters["num_positions"] > original
    name = "long_factor" if is_long else "short_factor"
    factors: Any = parameters.get(name)
    is_list = isinstance(factors, list) and len(factors) == len(inverse)
    if not (is_list and all(isinstance(x, (int, float)) and x > 0 for x in factors)):
        raise ConfigError(
            f"rope scaling of type {parameters['rope_type']!r} needs {name} as a list of "
            f"{len(inverse)} numbers above 0, the model's config.json has {factors!r}"
        )
    logger.info(
        "longrope: %s for sequences of every length, because max_model_len = %d is %s the original "
        "length of %.0f tokens",
        name,
        parameters["num_positions"],
        "more than" if is_long else "at most",
        original,
    )
    # not inverse / factors, which would be rounded twice
    scaled = 1.0 / (torch.tensor(factors) * _powers(2 * len(inverse), parameters))
    if parameters.get("attention_factor") is not None:
        return scaled, _number(parameters, "attention_factor")
    longest = parameters.get("max_position_embeddings") or original
    factor = _number(parameters, "factor", longest / original)
    return scaled, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[torch.Tensor, Parameters], tuple[torch.Tensor, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # its name in early files of Phi-3, which transformers 5 refuses
    "yarn": _yarn,
}
"""By `rope_type`. Each returns the scaled inverse frequencies, float32 `[rotary_dim / 2]`, and a
factor on cosines and sines."""
