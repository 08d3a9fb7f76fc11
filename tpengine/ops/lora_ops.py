"""Low-rank adapters (LoRA, Hu et al. 2021) beside a linear layer: `out += B A x`, for the rows of a
step that have an adapter, each with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tpengine.ops import lora_reference
from tpengine.ops.library import op
from tpengine.ops.lora_reference import LORA_PANEL, num_blocks, pack_a, pack_b, tile_shape

_add_lora = op(lora_reference.add_lora, "out", "shrunk")


@dataclass(frozen=True, slots=True)
class LoRARows:
    """The rows of a step that have an adapter, on the device of the step.

    Attributes:
        rows: int32 `[num_lora_rows]`, rows of x and out, each at most once; those of one adapter
            are neighbours.
        groups: int32 `[num_groups, 3]`: slot, begin and end in `rows`. A group may be empty, and
            entries of `rows` that are in no group are not read: a recorded step has all places.
    """

    rows: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True)
class LoRASlots:
    """The adapters of one linear layer, one in each slot. A fused layer has several parts (q, k and
    v), each with its own A and B.

    Attributes:
        a: `[num_slots, num_parts, max_rank / 4, lines, 4, line]`, a line is 64 bytes.
        b: `[num_slots, num_panels, max_rank, 16]`, the panels of all parts.
        ranks: int32 `[num_slots, num_parts]`; 0: the slot has no adapter for this part.
        first_outputs: int32 `[num_parts + 1]`: the first output of each part, then the end.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    first_outputs: Tensor

    @property
    def num_columns(self) -> int:
        """Columns of A's result, for all parts."""
        return self.a.shape[1] * self.max_rank

    @property
    def max_rank(self) -> int:
        """The highest rank of a slot."""
        return self.a.shape[2] * lora_reference.LORA_TILE


def make_slots(
    num_slots: int,
    max_rank: int,
    in_features: int,
    part_sizes: Sequence[int],
    dtype: torch.dtype,
    allocate: Callable[[tuple[int, ...]], Tensor],
) -> LoRASlots:
    """Returns empty slots for a layer.

    Args:
        max_rank: rounded up to a multiple of 4.
        part_sizes: outputs of each part, in the order of the layer's outputs.
        dtype: of A and B: float32 or bfloat16, on a GPU float16 too.
        allocate: returns memory of this shape and dtype for A, then for B, on the layer's device.
    """
    tiles = tile_shape(max_rank, in_features, dtype)
    panels = sum(num_blocks(size, LORA_PANEL) for size in part_sizes)
    a = allocate((num_slots, len(part_sizes), *tiles))
    b = allocate((num_slots, panels, tiles[0] * lora_reference.LORA_TILE, LORA_PANEL))
    ranks = torch.zeros(num_slots, len(part_sizes), dtype=torch.int32, device=a.device)
    first_outputs = torch.tensor([0, *accumulate(part_sizes)], dtype=torch.int32, device=a.device)
    return LoRASlots(a, b, ranks, first_outputs)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """What an adapter adds to one part of a layer, as a slot holds it.

    Attributes:
        a: see `pack_a`.
        b: see `pack_b`; it contains the adapter's scaling.
    """

    rank: int
    a: Tensor
    b: Tensor


def pack_part(a: Tensor, b: Tensor, dtype: torch.dtype) -> PackedPart:
    """Packs A `[rank, in_features]` and B `[outputs of the part, rank]`.

    Args:
        b: contains the adapter's scaling.
        dtype: of the slots.
    """
    assert len(a) == b.shape[1], (a.shape, b.shape)
    return PackedPart(len(a), pack_a(a.to(dtype)), pack_b(b.to(dtype)))


def write_slot(slots: LoRASlots, slot: int, parts: Sequence[PackedPart | None]) -> None:
    """Copies an adapter into a slot.

    Args:
        parts: of each part, on any device. None: the adapter does not change this part.
    """
    first, panel = slots.first_outputs.tolist(), 0
    for part, (begin, end) in enumerate(pairwise(first)):
        start, panel = panel, panel + num_blocks(end - begin, LORA_PANEL)
        packed = parts[part]
        if packed is None:
            continue
        assert packed.rank <= slots.max_rank, (packed.rank, slots.max_rank)
        assert len(packed.b) == panel - start, (packed.b.shape, begin, end)
        slots.a[slot, part, : len(packed.a)].copy_(packed.a)
        slots.b[slot, start:panel].view(-1)[: packed.b.numel()].copy_(packed.b.view(-1))
    ranks = [0 if packed is None else packed.rank for packed in parts]
    slots.ranks[slot] = torch.tensor(ranks, dtype=torch.int32)


def add_lora(out: Tensor, x: Tensor, slots: LoRASlots, rows: LoRARows) -> None:
    """`out[row] += B A x[row]` for each row with an adapter; sums in float32, rounded once. A row's
    result does not depend on other rows; other rows of out are not touched.

    Args:
        out: `[num_rows, out_features]`, what the layer itself gave; float32 or bfloat16, on a GPU
            float16 too.
        x: `[num_rows, in_features]`, same dtype; the slots may have another.

    Raises:
        RuntimeError: dtypes, shapes or strides do not fit, or on a CPU a row, slot or rank does
            not exist.
    """
    shrunk = x.new_empty(len(rows.rows), slots.num_columns, dtype=torch.float32)
    _add_lora(
        out, x, slots.a, slots.b, slots.ranks, slots.first_outputs, rows.rows, rows.groups, shrunk
    )  # fmt: skip
