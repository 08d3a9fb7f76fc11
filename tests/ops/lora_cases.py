"""Random adapters of mixed ranks, groups of rows, and what they add, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpengine.ops.lora_ops import LoRARows, LoRASlots, PackedPart, make_slots, pack_part, write_slot

from .cases import generator, nan_like, poisoned

PARTS = (70, 16, 33)
"""Outputs: panels that are not full, and in one part a number of them that is not even."""
RANKS = [(4, 16, 64), (8, 0, 5), (0, 0, 0), (1, 64, 12), (32, 32, 32)]
"""Of each slot, in each part."""


@dataclass
class Case:
    """Slots, and what they add to each row of x by slot, in float64."""

    slots: LoRASlots
    x: Tensor
    added: Tensor


def make_case(dtypes: tuple[torch.dtype, torch.dtype], num_rows: int, inputs: int) -> Case:
    """Adapters of `RANKS` in slots that held others before, and rows as a view of a wider tensor
    full of NaN."""
    gen = generator(inputs)
    x = torch.full((num_rows, inputs + 6), float("nan"), dtype=dtypes[0])[:, :inputs]
    x[:] = torch.randn(num_rows, inputs, generator=gen)
    slots = make_slots(len(RANKS), 64, inputs, PARTS, dtypes[1], partial(poisoned, dtype=dtypes[1]))
    added = torch.zeros(len(RANKS), num_rows, sum(PARTS), dtype=torch.float64)
    for slot, ranks in enumerate(RANKS):
        parts: list[PackedPart | None] = []
        for part, (rank, size) in enumerate(zip(ranks, PARTS, strict=True)):
            a = (torch.randn(rank, inputs, generator=gen) / inputs**0.5).to(dtypes[1])
            b = torch.randn(size, rank, generator=gen).to(dtypes[1])
            parts.append(pack_part(a, b, dtypes[1]) if rank else None)
            first = sum(PARTS[:part])
            added[slot, :, first : first + size] = x.double() @ a.double().t() @ b.double().t()
        write_slot(slots, slot, parts)
    return Case(slots, x, added)


def rows_of(groups: Sequence[tuple[int, Sequence[int]]]) -> LoRARows:
    """Rows by slot, among memory for more rows and groups."""
    rows, table = [], [(0, 0, 0)]
    for slot, own in groups:
        table.append((slot, len(rows), len(rows) + len(own)))
        rows.extend(own)
    rows += [1 << 30] * 3
    return LoRARows(*(torch.tensor(t, dtype=torch.int32) for t in (rows, table)))


def arguments(out: Tensor, x: Tensor, slots: LoRASlots, rows: LoRARows) -> tuple[Tensor, ...]:
    """Those of the op."""
    shrunk = nan_like(torch.empty(len(rows.rows), slots.num_columns))
    return (
        out, x, slots.a, slots.b, slots.ranks, slots.first_outputs, rows.rows, rows.groups, shrunk,
    )  # fmt: skip


GROUPS: list[list[tuple[int, list[int]]]] = [
    [(0, [0])],
    [(3, [4, 2]), (0, [1, 0, 7]), (1, [6]), (2, [3])],
    [(4, [*range(11)]), (1, [*range(29, 11, -1)]), (0, [*range(30, 113)])],
]


def expected(before: Tensor, case: Case, groups: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """What `before` becomes, in float64; only its first columns are the layer's outputs."""
    result = before.double()
    for slot, own in groups:
        result[own, : sum(PARTS)] += case.added[slot, own]
    return result


def assert_untouched(
    after: Tensor, before: Tensor, groups: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Rows in no group, and columns beyond the outputs, are as before."""
    others = [row for row in range(len(after)) if not any(row in own for _, own in groups)]
    assert others
    assert torch.equal(after[others], before[others])
    assert torch.equal(after[:, sum(PARTS) :], before[:, sum(PARTS) :])
