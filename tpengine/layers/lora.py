"""LoRA (https://arxiv.org/abs/2106.09685): low-rank additions to linear layers, `x A^T B^T` for
each row by its adapter.

A layer has slots of one size for A and B. They are divided over ranks as the layer is: a
column-parallel layer has its rows of B and all of A, a row-parallel one its columns of A and all of
B, so that the layer's own sum over ranks completes the addition too. Layers that are one product
(q, k and v) have one A, with columns for each of them, and a B for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tpengine.adapters import AdapterPart, Targets
from tpengine.config import LoRAConfig
from tpengine.layers.linear import Linear
from tpengine.layers.weights import LoadedTensor, Weights, WeightShard, copy_part, transposed
from tpengine.ops.lora import LoRARows, lora_expand, lora_shrink

HostAdapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""This rank's A `[rank, in_features]` and B `[n, rank]` of each layer; B contains the scaling."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One linear layer of a checkpoint: the whole or a part of one of ours.

    Attributes:
        shards: its parts, as views of the outline of our layer's weight.
        first_column: of its own in the layer's A.
        first_output: of this rank, in the layer.
        b: `[num_slots, n, max_rank]`.
    """

    layer: LinearAdapters
    shards: tuple[WeightShard, ...]
    first_column: int
    first_output: int
    b: torch.Tensor

    def own_a(self, a: torch.Tensor) -> torch.Tensor:
        """This rank's columns of A `[rank, total_in_features]`."""
        (shard, *_), in_features = self.shards, self.layer.in_features
        if shard.dim != 1:
            return a
        own = a.new_zeros(len(a), in_features)
        own[:, : shard.length] = a[:, shard.start : shard.start + shard.length]
        return own

    def own_b(self, b: torch.Tensor) -> torch.Tensor:
        """This rank's rows of B `[total_out_features, rank]`, in the order of our layer."""
        rank, in_features, offset = b.shape[1], self.layer.in_features, 0
        own = b.new_zeros(self.layer.out_features, rank)
        for shard in self.shards:
            outline = shard.target
            strides = [stride // in_features * rank for stride in outline.stride()[:-1]]
            start = int(outline.storage_offset()) // in_features * rank
            view = own.as_strided((*outline.shape[:-1], rank), (*strides, 1), start)
            dim = 0 if shard.dim == 0 else None
            copy_part(view, replace(shard, target=view, dim=dim), LoadedTensor(b), offset)
            offset += shard.total
        return own[self.first_output : self.first_output + self.b.shape[1]]


class LinearAdapters:
    """The slots of one of our linear layers; `Linear.adapters` after `AdapterLayers` was made.

    Args:
        parts: of each part its name in the checkpoint and its shards.
    """

    def __init__(
        self, layers: AdapterLayers, linear: Linear, parts: Mapping[str, list[WeightShard]]
    ) -> None:
        self._layers = layers
        self.out_features = linear.out_features
        self.in_features = linear.matrix.outline.shape[1]
        max_rank, empty = layers.max_rank, layers.empty
        self.a = empty(len(parts) * max_rank, self.in_features)
        self.targets: dict[str, _Target] = {}
        for place, (name, shards) in enumerate(parts.items()):
            plain = [transposed(one) if one.is_transposed else one for one in shards]
            first = min(int(one.target.storage_offset()) for one in plain) // self.in_features
            size = sum(math.prod(one.target.shape[:-1]) for one in plain)
            kept = tuple(replace(one, matrix=None) for one in plain)
            b = empty(size, max_rank)
            self.targets[name] = _Target(self, kept, place * max_rank, first, b)

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds to `out [num_rows, out_features]` for the rows of x that have an adapter."""
        lora_rows = self._layers.rows
        if lora_rows is None:
            return
        shrunk = x.new_empty(len(lora_rows.rows), self.a.shape[1], dtype=torch.float32)
        lora_shrink(shrunk, x, self.a, lora_rows)
        for target in self.targets.values():
            lora_expand(out, shrunk, target.b, lora_rows, target.first_output, target.first_column)


class AdapterLayers:
    """All linear layers of a model that can have adapters. To be made after the model, and before
    its weights are read.

    Args:
        prefix: start of the names of the decoder's layers; the output head takes no adapter.

    Attributes:
        targets: sizes over all ranks.
        rows: of the present forward pass; None: no row has an adapter. See `applied`.
        num_bytes: of all slots.
    """

    def __init__(self, weights: Weights, prefix: str, config: LoRAConfig) -> None:
        self.max_rank = config.max_lora_rank
        self.rows: LoRARows | None = None
        self.num_bytes = 0
        self.num_slots = config.max_loras
        self._weights = weights
        is_auto = config.lora_dtype == "auto"
        self._dtype = weights.dtype if is_auto else getattr(torch, config.lora_dtype)
        linears = {id(linear.matrix): linear for linear in weights.linears}
        parts: dict[Linear, dict[str, list[WeightShard]]] = {}
        for name, shards in weights.shards.items():
            linear = linears.get(id(shards[0].matrix))
            if linear is not None and name.startswith(prefix):
                parts.setdefault(linear, {})[name.removesuffix(".weight")] = shards
        self._layers: list[LinearAdapters] = []
        sizes: dict[str, tuple[int, int]] = {}
        for linear, own in parts.items():
            linear.adapters = LinearAdapters(self, linear, own)
            self._layers.append(linear.adapters)
            for name, target in linear.adapters.targets.items():
                dim = target.shards[0].dim
                whole = target.shards[0].total if dim == 1 else target.layer.in_features
                outputs = sum(one.total for one in target.shards) if dim == 0 else len(target.b[0])
                sizes[name] = outputs, whole
        self.targets: Targets = sizes

    def empty(self, *shape: int) -> torch.Tensor:
        """Allocates a tensor `[num_slots, *shape]` of zeros."""
        device = self._weights.device
        slots = torch.zeros(self.num_slots, *shape, dtype=self._dtype, device=device)
        self.num_bytes += slots.nbytes
        return self._weights.table(slots)

    @contextmanager
    def applied(self, rows: LoRARows | None) -> Iterator[None]:
        """Within the block the layers add to these rows."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def own_part(
        self, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, AdapterPart]
    ) -> HostAdapter:
        """Returns this rank's part of an adapter's tensors, which were checked."""
        found = {}
        for layer in self._layers:
            for name in layer.targets.keys() & parts.keys():
                target, prefix = layer.targets[name], f"base_model.model.{name}.lora_"
                a, b = (tensors[f"{prefix}{which}.weight"].float() for which in "AB")
                b = target.own_b(b * parts[name].scaling)
                found[name] = target.own_a(a).to(self._dtype), b.to(self._dtype)
        return found

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Puts an adapter into a slot, in place of the one before."""
        for layer in self._layers:
            layer.a[slot].zero_()
            for name, target in layer.targets.items():
                target.b[slot].zero_()
                if name in adapter:
                    a, b = adapter[name]
                    layer.a[slot, target.first_column : target.first_column + len(a)].copy_(a)
                    target.b[slot, :, : b.shape[1]].copy_(b)
