"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its context extensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tpengine.errors import ConfigError


def rope_parameters(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads either spelling of a config into one.

    transformers 5 writes `rope_parameters` (with `rope_theta` in it), earlier versions `rope_theta`
    beside an optional `rope_scaling`, whose kind is called `rope_type` or, earlier, `type`.

    Returns:
        A dict with at least `rope_type` and `rope_theta`.
    """
    found = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", hf_config.get("rope_theta") or 10000.0)
    return found


def build_cos_sin_cache(
    hf_config: Mapping[str, Any], head_dim: int, max_positions: int, device: torch.device
) -> torch.Tensor:
    """Cosines, then sines, of every position's angles.

    Args:
        max_positions: positions 0 to this one are covered.

    Returns:
        float32 `[max_positions, rotary_dim]`.

    Raises:
        ConfigError: a kind of scaling that is not supported.
    """
    parameters = rope_parameters(hf_config)
    rotary_dim = int(head_dim * float(hf_config.get("partial_rotary_factor") or 1.0))
    inverse = _inverse_frequencies(parameters, rotary_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def _inverse_frequencies(parameters: Mapping[str, Any], rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inverse = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    kind = parameters["rope_type"]
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / float(parameters["factor"])
    if kind == "llama3":
        return _llama3(inverse, parameters)
    raise ConfigError(
        f"rope scaling of type {kind!r} is not supported; supported: default, linear, llama3"
    )


def _llama3(inverse: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths stretched, short ones kept, a blend between."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled)
