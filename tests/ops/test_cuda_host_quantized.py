"""The CUDA kernels of packed weights on the CPU stand-in, and their plain-torch reference, against
numbers that never saw the packed layout."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from tpengine.ops import weight_only_reference as reference
from tpengine.ops.quantized_ops import MINIMA, NO_OFFSETS, QuantizedFormat, per_output
from tpengine.ops.quantized_reference import round_to_groups
from tpengine.ops.weight_only import pack_groups, quantize_for_gpu

from .cases import generator, nan_like, relative_error
from .cuda_host_library import BOUND, I32, I64, P, load_host, needs_compiler, pointer, set_schedule
from .cuda_host_library import struct as fields
from .packed_cases import FORMATS, INPUTS, Case, make_case

PackedWeight = fields(
    ("packed", P), ("num_panels", I32), ("num_steps", I32), ("num_groups", I32),
    ("steps_per_group", I32), ("offsets", I32),
)  # fmt: skip
WeightOnlyArgs = fields(
    ("out", P), ("x", P), ("bias", P), ("weight", PackedWeight), ("out_stride", I64),
    ("x_stride", I64), ("num_rows", I32), ("out_features", I32), ("in_features", I32),
    ("panels_per_cta", I32),
)  # fmt: skip
DequantizeArgs = fields(("out", P), ("weight", PackedWeight), ("first_panel", I32))
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def packed_struct(case: Case) -> ctypes.Structure:
    """The weight as the kernels take it."""
    weight, form = case.weight, case.weight.format
    return PackedWeight(
        weight.packed.data_ptr(), -(-weight.out_features // 32), weight.padded_inputs // 32,
        form.num_groups(weight.in_features), form.group_size // 32, form.offsets,
    )  # fmt: skip


def make_rows(rows: int, dtype: torch.dtype) -> Tensor:
    """Inputs of sizes that differ, with a mean, as a view of a wider tensor full of NaN."""
    wide = torch.full((rows, INPUTS + 16), float("nan"), dtype=dtype)
    x = wide[:, 8 : 8 + INPUTS]
    x[:] = (torch.randn(rows, INPUTS, generator=generator(rows)) + 0.5).mul_(
        torch.logspace(0, 2, rows).unsqueeze(1)
    )
    return x


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_host("quantized")


def multiply(kernels: ctypes.CDLL | None, case: Case, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product in a wider tensor full of NaN, by the kernel, or without one by the reference."""
    outputs = case.weight.out_features
    wide = nan_like(torch.empty(len(x), outputs + 3, dtype=x.dtype))
    out = wide[:, :outputs]
    if kernels is None:
        reference.weight_only_linear(out, x, case.weight.packed, bias, *case.format)
    else:
        args = WeightOnlyArgs(
            pointer(out), pointer(x), pointer(bias), packed_struct(case), out.stride(0),
            x.stride(0), len(x), outputs, x.shape[1], 1,
        )  # fmt: skip
        kernels.weight_only_linear(CODES[x.dtype], case.format[0], ctypes.byref(args))
    assert wide[:, outputs:].isnan().all(), "wrote beyond the last output"
    return out


@needs_compiler
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linear(kernels: ctypes.CDLL, form: QuantizedFormat, dtype: torch.dtype) -> None:
    for seed, (rows, outputs) in enumerate([(1, 33), (7, 64), (9, 40), (17, 32)]):
        set_schedule(kernels, seed)
        case, x = make_case(form, outputs), make_rows(rows, dtype)
        bias = torch.randn(outputs, generator=generator(1)).to(dtype) if seed % 2 else None
        expected = x.double() @ case.values.t() + (0.0 if bias is None else bias.double())
        for backend in (kernels, None):
            found = multiply(backend, case, x, bias)
            assert relative_error(found, expected) < BOUND[dtype]


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(kernels: ctypes.CDLL, bits: int) -> None:
    set_schedule(kernels, 0)
    case, x = make_case(QuantizedFormat(bits, 64), 40), make_rows(32, torch.bfloat16)
    together = multiply(kernels, case, x, None)
    for rows in range(1, 32):
        assert torch.equal(multiply(kernels, case, x[-rows:], None), together[-rows:])


@needs_compiler
def test_many_panels_share_a_block(kernels: ctypes.CDLL) -> None:
    """So many outputs that a block takes two and four panels; the last one has fewer."""
    set_schedule(kernels, 1)
    x = make_rows(1, torch.bfloat16)[:, :40].contiguous()
    for outputs in (257 * 32 - 1, 513 * 32 - 1):
        case = make_case(QuantizedFormat(4, 32, MINIMA), outputs, inputs=40)
        found = multiply(kernels, case, x, None)
        assert relative_error(found, x.double() @ case.values.t()) < BOUND[torch.bfloat16]


@needs_compiler
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_dequantize(kernels: ctypes.CDLL, form: QuantizedFormat) -> None:
    case = make_case(form, 70)
    weight = case.weight
    for dtype in CODES:
        out = nan_like(torch.empty(64, weight.padded_inputs, dtype=dtype))
        again = out.clone()
        args = DequantizeArgs(out.data_ptr(), packed_struct(case), 1)
        kernels.dequantize_weight(CODES[dtype], form.bits, ctypes.byref(args), 2)
        reference.dequantize_weight(again, weight.packed, 32, 70, *case.format)
        expected = case.values[32:].float().to(dtype)
        for found in (out, again):
            assert torch.equal(found[:38, :INPUTS], expected)


@pytest.mark.parametrize("form", [QuantizedFormat(4, 32), per_output(INPUTS)], ids=str)
def test_a_weight_is_rounded_as_on_a_cpu(
    form: QuantizedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.ops.weight_only._PIECE", 64 * INPUTS)  # in pieces of 32 outputs
    values = torch.randn(100, INPUTS, generator=generator(3)).bfloat16()
    weight = quantize_for_gpu(values, form)
    q, scales = round_to_groups(values.float(), form.bits, form.group_size)
    assert torch.equal(weight.packed, pack_groups(q[:, :INPUTS], scales, None, form).packed)
    out = torch.empty(128, weight.padded_inputs)
    reference.dequantize_weight(out, weight.packed, 0, 100, form.bits, form.group_size, NO_OFFSETS)
    steps = scales.float().abs().repeat_interleave(form.group_size, 1)[:, :INPUTS]
    lost = (out[:100, :INPUTS] - values.float()).abs() / steps
    assert lost.max() < (3.0 if form.bits == 4 else 0.6)  # in 4 bits a step may cut the largest off
    assert lost.mean() < 0.3
