"""The CUDA kernels of adapters on the CPU stand-in, against numbers that never saw their layout."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tpengine.ops.lora_ops import LoRARows, LoRASlots

from .cases import generator, nan_like, relative_error
from .cuda_host_library import BOUND, I32, I64, P, load_host, needs_compiler, pointer, set_schedule
from .cuda_host_library import struct as fields
from .lora_cases import GROUPS, PARTS, assert_untouched, expected, make_case, rows_of

pytestmark = needs_compiler

LoRAArgs = fields(
    ("out", P), ("x", P), ("a", P), ("b", P), ("ranks", P), ("first_outputs", P), ("rows", P),
    ("groups", P), ("shrunk", P), ("out_stride", I64), ("x_stride", I64), ("num_groups", I32),
    ("num_lora_rows", I32), ("num_parts", I32), ("column_tiles", I32), ("num_lines", I32),
    ("num_panels", I32), ("in_features", I32), ("wide_x", I32),
)  # fmt: skip
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
F32, F16, BF16 = CODES


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_host("lora")


def add_lora(
    kernels: ctypes.CDLL, out: Tensor, x: Tensor, slots: LoRASlots, rows: LoRARows, is_wide: bool
) -> None:
    shrunk = nan_like(torch.empty(len(rows.rows), slots.num_columns))
    _, num_parts, column_tiles, num_lines = slots.a.shape[:4]
    args = LoRAArgs(
        *map(pointer, (out, x, slots.a, slots.b, slots.ranks, slots.first_outputs)),
        *map(pointer, (rows.rows, rows.groups, shrunk)), out.stride(0), x.stride(0),
        len(rows.groups), len(rows.rows), num_parts, column_tiles, num_lines, slots.b.shape[1],
        x.shape[1], is_wide,
    )  # fmt: skip
    kernels.add_lora(CODES[x.dtype], CODES[slots.a.dtype], ctypes.byref(args))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("groups", GROUPS[:2], ids=["one row", "few rows"])
@pytest.mark.parametrize("inputs", [58, 346])
def test_equals_products_in_float64(
    kernels: ctypes.CDLL,
    dtypes: tuple[torch.dtype, torch.dtype],
    groups: list[tuple[int, list[int]]],
    inputs: int,
) -> None:
    case = make_case(dtypes, 9, inputs)
    before = torch.randn(9, sum(PARTS) + 5, generator=generator(1)).to(dtypes[0])
    results = []
    for seed, is_wide in ((0, False), (2, True)):
        set_schedule(kernels, seed)
        after = before.clone()
        out, rows = after[:, : sum(PARTS)], rows_of(groups)
        add_lora(kernels, out, case.x, case.slots, rows, is_wide)
        assert relative_error(after, expected(before, case, groups)) < BOUND[dtypes[0]]
        assert_untouched(after, before, groups)
        results.append(after)
    assert torch.equal(*results)


def test_a_row_is_the_same_bits_alone_and_in_a_crowd(kernels: ctypes.CDLL) -> None:
    case = make_case((BF16, BF16), 32, 90)
    base = torch.randn(32, sum(PARTS), generator=generator(2)).to(BF16)
    whole, groups = base.clone(), [(0, [*range(1, 32, 2)]), (1, [*range(0, 30, 2)])]
    add_lora(kernels, whole, case.x, case.slots, rows_of(groups), True)
    for slot, row in ((0, 1), (0, 31), (1, 16)):
        alone, rows = base[row : row + 1].clone(), rows_of([(slot, [0])])
        add_lora(kernels, alone, case.x[row : row + 1], case.slots, rows, True)
        assert torch.equal(alone[0], whole[row])
