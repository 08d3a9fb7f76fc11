"""LoRA (https://arxiv.org/abs/2106.09685): low-rank additions to linear layers, `x A^T B^T` for
each row by its adapter.

A layer has slots of one size for A and B. They are divided over ranks as the layer is: a
column-parallel layer has its rows of B and all of A, a row-parallel one its columns of A and all of
B, so that the layer's own sum over ranks completes the addition too. Layers that are one product
(q, k and v) have an A and a B for each part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tpengine.config import LoRAConfig
from tpengine.layers.adapter_parts import AdapterPart, Targets
from tpengine.layers.linear import Linear
from tpengine.layers.weights import LoadedTensor, Weights, WeightShard, copy_part, transposed
from tpengine.ops.lora_ops import LoRARows, PackedPart, add_lora, make_slots, pack_part, write_slot

HostAdapter = Mapping[str, PackedPart]
"""This rank's part of an adapter by the name of the layer, in the form of the slots."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One linear layer of a checkpoint: the whole or a part of one of ours.

    Attributes:
        shards: its parts, as views of the outline of our layer's weight.
        outputs: of this rank, in our layer.
        shape: of our layer.
    """

    shards: tuple[WeightShard, ...]
    outputs: slice
    shape: tuple[int, int]

    @classmethod
    def of(cls, shards: Sequence[WeightShard], shape: tuple[int, int]) -> _Target:
        """Returns the target of the shards that were declared under one name."""
        kept = [replace(transposed(x) if x.is_transposed else x, matrix=None) for x in shards]
        first = min(int(shard.target.storage_offset()) for shard in kept) // shape[1]
        size = sum(math.prod(shard.target.shape[:-1]) for shard in kept)
        return cls(tuple(kept), slice(first, first + size), shape)

    @property
    def total_shape(self) -> tuple[int, int]:
        """Outputs and inputs over all ranks."""
        (shard, *_), (outputs, inputs) = self.shards, self.shape
        if shard.dim == 0:
            return sum(x.total for x in self.shards), inputs
        return outputs, shard.total if shard.dim == 1 else inputs

    def own_a(self, a: torch.Tensor) -> torch.Tensor:
        """This rank's columns of A `[rank, total_in_features]`."""
        shard = self.shards[0]
        if shard.dim != 1:
            return a
        own = a.new_zeros(len(a), self.shape[1])
        own[:, : shard.length] = a[:, shard.start : shard.start + shard.length]
        return own

    def own_b(self, b: torch.Tensor) -> torch.Tensor:
        """This rank's rows of B `[total_out_features, rank]`, in the order of our layer."""
        rank, (outputs, inputs), offset = b.shape[1], self.shape, 0
        own = b.new_zeros(outputs, rank)
        for shard in self.shards:
            outline = shard.target
            strides = [stride // inputs * rank for stride in outline.stride()[:-1]]
            start = int(outline.storage_offset()) // inputs * rank
            view = own.as_strided((*outline.shape[:-1], rank), (*strides, 1), start)
            dim = 0 if shard.dim == 0 else None
            copy_part(view, replace(shard, target=view, dim=dim), LoadedTensor(b), offset)
            offset += shard.total
        return own[self.outputs]


class LinearAdapters:
    """The slots of one of our linear layers; `Linear.adapters` after `AdapterLayers` was made.

    Args:
        targets: its parts, by their names in the checkpoint.
        shape: of the layer, `(out_features, in_features)`.
    """

    def __init__(
        self, layers: AdapterLayers, targets: Mapping[str, _Target], shape: tuple[int, int]
    ) -> None:
        self._layers = layers
        outputs, inputs = shape
        self.targets = dict(sorted(targets.items(), key=lambda item: item[1].outputs.start))
        sizes = [target.outputs.stop - target.outputs.start for target in self.targets.values()]
        assert sum(sizes) == outputs, list(targets)
        self._slots = make_slots(
            layers.num_slots, layers.max_rank, inputs, sizes, layers.dtype, layers.allocate
        )

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Adds to `out [num_rows, out_features]` for the rows of x that have an adapter."""
        if self._layers.rows is not None:
            add_lora(out, x, self._slots, self._layers.rows)

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """See `AdapterLayers.fill`."""
        write_slot(self._slots, slot, [adapter.get(name) for name in self.targets])


class AdapterLayers:
    """All linear layers of a model that can have adapters. To be made after the model, and before
    its weights are read.

    Args:
        prefix: start of the names of the decoder's layers; the output head takes no adapter.

    Attributes:
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
        self.dtype = weights.dtype if is_auto else getattr(torch, config.lora_dtype)
        linears = {id(linear.matrix): linear for linear in weights.linears}
        parts: dict[Linear, dict[str, list[WeightShard]]] = {}
        for name, shards in weights.shards.items():
            linear = linears.get(id(shards[0].matrix))
            if linear is not None and name.startswith(prefix):
                parts.setdefault(linear, {})[name.removesuffix(".weight")] = shards
        self._layers: list[LinearAdapters] = []
        sizes: dict[str, tuple[int, int]] = {}
        for linear, own in parts.items():
            outputs, inputs = linear.matrix.outline.shape
            targets = {name: _Target.of(own[name], (outputs, inputs)) for name in own}
            sizes |= {name: target.total_shape for name, target in targets.items()}
            if not weights.elsewhere.issuperset(f"{name}.weight" for name in own):
                linear.adapters = LinearAdapters(self, targets, (outputs, inputs))
                self._layers.append(linear.adapters)
        self._sizes = sizes

    @property
    def targets(self) -> Targets:
        """Sizes over all ranks. What else the checkpoint has is known once it was read."""
        others = (name.removesuffix(".weight") for name in self._weights.others)
        return {**self._sizes, **dict.fromkeys(others)}

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns memory for slots."""
        memory = torch.empty(shape, dtype=self.dtype, device=self._weights.device).zero_()
        self.num_bytes += memory.nbytes
        return self._weights.table(memory)

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
        packed = {}
        for layer in self._layers:
            for name in layer.targets.keys() & parts.keys():
                target = layer.targets[name]
                prefix = f"base_model.model.{parts[name].name}.lora_"
                a, b = (tensors[f"{prefix}{which}.weight"] for which in "AB")
                b = target.own_b(b.float() * parts[name].scaling)
                packed[name] = pack_part(target.own_a(a), b, self.dtype)
        return packed

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Puts an adapter into a slot, in place of the one before; an empty one adds nothing."""
        for layer in self._layers:
            layer.fill(slot, adapter)
