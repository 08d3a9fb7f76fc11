"""Adapters beside a linear layer: every instruction set against float64, and independence of the
batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.matrix import matrix
from torch import Tensor

from tpengine.ops.lora_ops import LoRARows, LoRASlots, PackedPart, make_slots, pack_part, write_slot

from .cases import (
    BACKENDS,
    ISAS,
    backend,
    generator,
    nan_like,
    on_cuda,
    poisoned,
    relative_error,
    replaced,
    threads,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BOUND = {F32: 3e-6, F16: 1e-3, BF16: 4e-3}
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)]
"""Of x and out, and of the adapters."""
CUDA_DTYPES = [(F32, F32), (BF16, BF16), (F16, F32), (F32, F16)]
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


GROUPS: dict[str, list[tuple[int, list[int]]]] = {
    "one row": [(0, [0])],
    "few rows": [(3, [4, 2]), (0, [1, 0, 7]), (1, [6]), (2, [3])],
    "many rows": [(4, [*range(11)]), (1, [*range(29, 11, -1)]), (0, [*range(30, 113)])],
}


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


@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    [*((name, *dtypes) for name in BACKENDS for dtypes in DTYPES), *on_cuda(*CUDA_DTYPES)],
    ids=str,
)
@pytest.mark.parametrize(("inputs", "crowd"), matrix([64, 346], list(GROUPS)), ids=str)
def test_equals_products_in_float64(
    name: str,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    inputs: int,
    crowd: str,
) -> None:
    groups = GROUPS[crowd]
    num_rows = max(row for _, own in groups for row in own) + 2
    case = make_case((dtype, weight_dtype), num_rows, inputs)
    wide = torch.randn(num_rows, sum(PARTS) + 5, generator=generator(1)).to(dtype)
    before = wide.clone()
    with backend(name) as op:
        op("add_lora")(*arguments(wide[:, : sum(PARTS)], case.x, case.slots, rows_of(groups)))
    assert relative_error(wide, expected(before, case, groups)) < BOUND[dtype]
    assert_untouched(wide, before, groups)


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, dtype) for name in ISAS for dtype in (F32, BF16)), *on_cuda(BF16)]
)
def test_a_row_is_the_same_bits_alone_and_in_a_crowd(name: str, dtype: torch.dtype) -> None:
    case = make_case((dtype, dtype), 100, 320)
    base = torch.randn(100, sum(PARTS), generator=generator(2)).to(dtype)
    groups = [(slot, list(range(slot, 100, 5))) for slot in range(5)]
    with backend(name) as op:
        whole = base.clone()
        with threads(2):
            op("add_lora")(*arguments(whole, case.x, case.slots, rows_of(groups)))
        for row in (0, 4, 41, 98):
            alone = base[row : row + 1].clone()
            rows = rows_of([(row % 5, [0])])
            op("add_lora")(*arguments(alone, case.x[row : row + 1], case.slots, rows))
            assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("name", BACKENDS)
def test_no_rows(name: str) -> None:
    case = make_case((F32, F32), 3, 64)
    out = nan_like(torch.empty(3, sum(PARTS)))
    with backend(name) as op:
        op("add_lora")(*arguments(out, case.x, case.slots, rows_of([(0, [])])))
        op("add_lora")(*arguments(out[:0], case.x[:0], case.slots, rows_of([])))
    assert out.isnan().all()


WRONG = [
    (0, lambda t: t[1:], r"out has shape \[4, 119\].*size 5"),
    (1, lambda t: t.bfloat16(), "out is float32; expected bfloat16"),
    (1, lambda t: t[:, 17:], r"a has shape \[5, 3, 16, 4, 4, 16\].*size 3 in dimension 3"),
    (2, lambda t: t.half(), "a is float16; on CPU the kernels take float32 and bfloat16"),
    (2, lambda t: t[:, :2].clone(), r"first_outputs has shape \[4\].*size 3"),
    (3, lambda t: t.bfloat16(), "b is bfloat16; expected float32"),
    (3, lambda t: t[:, 1:].clone(), r"b has shape \[5, 8, 64, 16\].*size 9"),
    (4, lambda t: t + 1, "ranks holds 65; expected 0 to 64"),
    (5, lambda t: t + 1, r"first_outputs\[2:4\] is 87, 120; expected.* 0 to 119"),
    (6, lambda t: t + 1, r"rows\[1\] is 5; x has rows 0 to 4"),
    (6, lambda t: t.long(), "rows is int64; expected int32"),
    (7, lambda t: t * 3, r"groups\[1\] is 12, 0, 6; .*slots 0 to 4 and 5 rows with adapters"),
    (7, lambda t: t + 1, r"groups\[1\] is 5, 1, 3"),
    (7, lambda t: t[:, :2].clone(), r"groups has shape \[2, 2\].*size 3"),
    (8, lambda t: t[2:], r"shrunk has shape \[3, 192\].*size 5"),
    (8, lambda t: t[:, 1:], r"shrunk has shape \[5, 191\].*size 192"),
    (8, lambda t: t.double(), "shrunk is float64; expected float32"),
]


@pytest.mark.skipif(not ISAS, reason="the native library is not built")
def test_wrong_arguments() -> None:
    case = make_case((F32, F32), 5, 64)
    right = arguments(torch.zeros(5, sum(PARTS)), case.x, case.slots, rows_of([(4, [3, 4])]))
    for index, change, message in WRONG:
        with pytest.raises(RuntimeError, match=f"tpengine::add_lora: {message}"):
            torch.ops.tpengine.add_lora.default(*replaced(index, change)(right))
    for rank, outputs, message in ((65, 70, "(65, 64)"), (4, 87, "torch.Size([6, 4, 16])")):
        part = pack_part(torch.zeros(rank, 64), torch.zeros(outputs, rank), F32)
        with pytest.raises(AssertionError, match=re.escape(message)):
            write_slot(case.slots, 0, [part, None, None])
