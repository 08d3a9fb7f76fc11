"""Parameters of a transformers model that are not in our layers, and the tensors of its checkpoint
under the names that the model has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tpengine.layers.weights import (
    CheckpointTensor,
    LoadedTensor,
    QuantizedSource,
    Weights,
    WeightShard,
)

_PROBED_ELEMENTS = 1 << 20
"""Larger parameters are zero in the probe (experts); smaller ones (norms, convolutions) matter.
Matrices have a mean of zero, since sums of many values saturate a router."""


def allocate_parameters(root: Any, weights: Weights) -> None:
    """Gives each parameter that is still on the meta device memory, whole on every rank, and
    declares it and the buffers of a checkpoint. Values are those of the probe."""
    generator = torch.Generator().manual_seed(0)
    originals: dict[int, tuple[str, nn.Parameter]] = {}
    for module_name, module in root.named_modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            name = f"{module_name}.{leaf}".lstrip(".")
            if id(parameter) in originals:
                weights.declare_repeat(name, originals[id(parameter)][0])
                module._parameters[leaf] = originals[id(parameter)][1]
                continue
            target = weights.replicated(name, *parameter.shape).zero_()
            if target.numel() <= _PROBED_ELEMENTS:
                values = torch.rand(target.shape, generator=generator)
                target.copy_(values + 0.5 if target.dim() == 1 else values - 0.5)
            allocated = nn.Parameter(target, requires_grad=False)
            originals[id(parameter)] = name, allocated
            module._parameters[leaf] = allocated
        _place_buffers(module_name, module, weights)


def _place_buffers(module_name: str, module: nn.Module, weights: Weights) -> None:
    for leaf, buffer in list(module._buffers.items()):
        if buffer is None:
            continue
        module._buffers[leaf] = placed = weights.table(buffer.to(weights.device))
        if leaf not in module._non_persistent_buffers_set:
            weights.declare(f"{module_name}.{leaf}".lstrip("."), WeightShard(placed))


class Outline:
    """The parameters that a model of transformers has before its layers are replaced, on the meta
    device: some of transformers' converters ask the model for shapes or dtypes."""

    def __init__(self, root: nn.Module) -> None:
        self._parameters = dict(root.named_parameters(remove_duplicate=False))

    def get_parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]


def convert_tensors(
    root: Any, outline: Outline, weights: Weights, tensors: Iterable[CheckpointTensor]
) -> Iterator[CheckpointTensor]:
    """Renames, merges and splits tensors of a checkpoint as transformers does when it loads one;
    yields the model's tensors.

    A merged parameter (all experts of a layer) is in memory together with the tensors of which it
    is made, one such parameter at a time.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    names, prefix = dict.fromkeys(weights.shards, True), root.base_model_prefix
    to_ignore = getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(expression) for expression in to_ignore]
    entries = get_model_conversion_mapping(root)
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in entries if not isinstance(entry, WeightConverter)]
    pending: dict[str, list[tuple[str, str, CheckpointTensor]]] = {}
    for file, name, source in tensors:
        if name not in names and any(expression.search(name) for expression in ignored):
            continue
        wanted, pattern = name, None
        if entries:
            wanted, pattern = rename_source_key(name, renamings, converters, prefix, names)
        if pattern is not None:
            pending.setdefault(wanted, []).append((name, pattern, (file, name, source)))
        else:
            yield file, wanted, source
    for wanted in list(pending):  # a source that was read stays mapped as long as it lives
        parts = pending.pop(wanted)
        converter = next(c for c in converters if parts[0][1] in c.source_patterns)
        weights.is_dequantized |= any(isinstance(part[2][2], QuantizedSource) for part in parts)
        yield from _merge(root.config, outline, converter, wanted, parts)


def _merge(
    config: Any,
    outline: Outline,
    converter: Any,
    wanted: str,
    parts: list[tuple[str, str, CheckpointTensor]],
) -> Iterator[CheckpointTensor]:
    from transformers.core_model_loading import dot_natural_key

    parts.sort(key=lambda part: dot_natural_key(part[0]))
    for name, pattern, (_, _, source) in parts:
        converter.add_tensor(wanted, name, pattern, lambda source=source: source[:])
    merged = converter.convert(wanted, model=outline, config=config)
    file = parts[0][2][0]
    for name, tensor in merged.items():
        whole = tensor[0] if isinstance(tensor, list) else tensor
        yield file, name, LoadedTensor(whole)
