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


class CheckpointConversion:
    """Renames and merges tensors of a checkpoint as transformers does when it loads one.

    A merged parameter (all experts of a layer) is in memory together with the tensors of which it
    is made, one such parameter at a time.
    """

    def __init__(self, root: Any, weights: Weights) -> None:
        self._root = root
        self._weights = weights
        self._names = dict.fromkeys(weights.shards, True)
        ignored = getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._renamings, self._converters = _conversions(root)

    def __call__(self, tensors: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
        """Yields the model's tensors."""
        pending: dict[str, list[tuple[str, str, CheckpointTensor]]] = {}
        for file, name, source in tensors:
            if name not in self._names and any(ignored.search(name) for ignored in self._ignored):
                continue
            wanted, pattern = self._rename(name)
            if pattern is not None:
                pending.setdefault(wanted, []).append((name, pattern, (file, name, source)))
            else:
                yield file, wanted, source
        for wanted in list(pending):  # a source that was read stays mapped as long as it lives
            yield from self._merge(wanted, pending.pop(wanted))

    def _rename(self, name: str) -> tuple[str, str | None]:
        if not self._renamings and not self._converters:
            return name, None
        from transformers.core_model_loading import rename_source_key

        prefix = self._root.base_model_prefix
        renamed: tuple[str, str | None] = rename_source_key(
            name, self._renamings, self._converters, prefix, self._names
        )
        return renamed

    def _merge(
        self, wanted: str, parts: list[tuple[str, str, CheckpointTensor]]
    ) -> Iterator[CheckpointTensor]:
        from transformers.core_model_loading import dot_natural_key

        converter = next(c for c in self._converters if parts[0][1] in c.source_patterns)
        parts.sort(key=lambda part: dot_natural_key(part[0]))
        for name, pattern, (_, _, source) in parts:
            converter.add_tensor(wanted, name, pattern, lambda source=source: source[:])
            self._weights.is_dequantized |= isinstance(source, QuantizedSource)
        merged = converter.convert(wanted, model=self._root, config=self._root.config)
        file = parts[0][2][0]
        for name, tensor in merged.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            yield file, name, LoadedTensor(whole)


def _conversions(root: Any) -> tuple[list[Any], list[Any]]:
    """Returns the class's renamings and converters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    entries = get_model_conversion_mapping(root)
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    return [entry for entry in entries if not isinstance(entry, WeightConverter)], converters
