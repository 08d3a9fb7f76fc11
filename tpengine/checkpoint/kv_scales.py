"""Scales of K and V for a KV cache in fp8, from a checkpoint's tensors or from a file of their own.

e4m3 reaches to 448, so the cache of a layer holds K / k_scale and V / v_scale. Other caches need no
scales. The names of the tensors and the schema of the file are those of vLLM 0.5.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpengine.checkpoint.model_files import read_json
from tpengine.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:  # the driver needs no torch
    from tpengine.layers.weights import CheckpointTensor, KVScaleTensors, TypedSource

_NAME = re.compile(r"(?:^|\.)(\d+)\.(?:\w+\.)+?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
"""`layers.0.self_attn.k_scale`, `.self_attn.attn.k_scale`, `.self_attn.k_proj.k_scale`,
`.self_attn.k_proj.output_scale`, and in older files `kv_scale` for both."""
_FILE_DTYPE = "float8_e4m3fn"


def without_scales(
    tensors: Iterable[tuple[str, str, TypedSource]],
    declared: Container[str],
    scales: KVScaleTensors,
) -> Iterator[tuple[str, str, TypedSource]]:
    """Yields all tensors but the scales of K and V, which it puts into `scales` without reading
    them.

    Args:
        declared: names of the model's parameters; a tensor of such a name is not a scale.
    """
    for tensor in tensors:
        match = _NAME.search(tensor[1])
        if match is None or tensor[1] in declared:
            yield tensor
            continue
        for kind in match[2] or match[3]:  # "kv" is both
            scales[int(match[1]), kind] = tensor


def read_scale(tensor: CheckpointTensor | None) -> float:
    """Returns the scale that a tensor holds; 1 if the checkpoint has no such tensor.

    Raises:
        ModelLoadError: it is not one number above 0.
    """
    if tensor is None:
        return 1.0
    file, name, source = tensor
    shape = source.get_shape()
    value = source[:] if shape else source[...]
    scale = float(value) if math.prod(shape) == 1 else math.nan
    if not 0 < scale < math.inf:
        got = f"is {scale}" if math.prod(shape) == 1 else f"has the shape {shape}"
        raise ModelLoadError(
            f"{name} in {file} {got}, a scale of an fp8 cache must be one number above 0; correct "
            "it, name a file with quantization_param_path, or use kv_cache_dtype='auto'"
        )
    return scale


def read_scale_file(path: str, model_type: str, tp_size: int, num_layers: int) -> tuple[Any, ...]:
    """Reads `quantization_param_path`; returns for each rank of a stage the scale of each layer.

    Raises:
        ConfigError: it is of another model, of another number of ranks, or has another schema.
        ModelLoadError: it cannot be read, or is not valid JSON.
    """
    if not Path(path).is_file():
        text = f"quantization_param_path = {path!r} is no file"
        raise ModelLoadError(f"{text}; name one that is there, or leave it out")
    fields = read_json(Path(path))
    cache = fields.get("kv_cache")
    cache = cache if isinstance(cache, Mapping) else {}
    ranks = cache.get("scaling_factor")
    _expect(path, "model_type", fields.get("model_type"), model_type, None)
    _expect(path, "kv_cache.dtype", cache.get("dtype"), _FILE_DTYPE)
    places = "the ranks of tensor_parallel_size", "the layers of the model"
    by_rank = _numbered(path, "kv_cache.scaling_factor", ranks, tp_size, places[0])
    scales = tuple(
        tuple(_numbered(path, f"scaling_factor of rank {rank}", layers, num_layers, places[1]))
        for rank, layers in enumerate(by_rank)
    )
    for rank, layers in enumerate(scales):
        for layer, scale in enumerate(layers):
            if type(scale) not in (int, float) or not 0 < scale < math.inf:
                place = f"the scale of layer {layer} on rank {rank}"
                text = f"quantization_param_path = {path!r}: {place} is {scale!r}"
                raise ConfigError(f"{text}, it must be a number above 0; correct the file")
    return scales


def _expect(path: str, field: str, value: object, *supported: object) -> None:
    if value not in supported:
        text = f"quantization_param_path = {path!r}: {field} is {value!r}, not {supported[0]!r}"
        raise ConfigError(f"{text}; give the file that was made for this model")


def _numbered(path: str, field: str, value: object, count: int, places: str) -> list[Any]:
    """The values of a JSON object whose names are 0 to count - 1, in this order."""
    fields = value if isinstance(value, Mapping) else {}
    if fields.keys() != {str(number) for number in range(count)}:
        text = f"quantization_param_path = {path!r}: {field} must have {places}, 0 to {count - 1}"
        raise ConfigError(f"{text}, it has {', '.join(fields) or 'none'}; make it for as many")
    return [fields[str(number)] for number in range(count)]
