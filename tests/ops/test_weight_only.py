"""Packed weights of a GPU: the CUDA kernels, and their plain-torch reference, against numbers that
never saw the packed layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpengine.ops import weight_only_reference as reference
from tpengine.ops.quantized_ops import MINIMA, NO_OFFSETS, QuantizedFormat, per_output
from tpengine.ops.quantized_reference import round_to_groups
from tpengine.ops.weight_only import quantize_for_gpu

from .cases import CUDA_DTYPES, backend, generator, nan_like, on_cuda, relative_error
from .cuda_host_ops import BOUND
from .packed_cases import FORMATS, INPUTS, Case, make_case, pack_groups

BACKENDS = ["reference", *on_cuda()]


def make_rows(rows: int, dtype: torch.dtype) -> Tensor:
    """Inputs of sizes that differ, with a mean, as a view of a wider tensor full of NaN."""
    wide = torch.full((rows, INPUTS + 16), float("nan"), dtype=dtype)
    x = wide[:, 8 : 8 + INPUTS]
    x[:] = (torch.randn(rows, INPUTS, generator=generator(rows)) + 0.5).mul_(
        torch.logspace(0, 2, rows).unsqueeze(1)
    )
    return x


def multiply(name: str, case: Case, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product, in a wider tensor full of NaN."""
    outputs = case.weight.out_features
    wide = nan_like(torch.empty(len(x), outputs + 3, dtype=x.dtype))
    out = wide[:, :outputs]
    with backend(name) as op:
        op("weight_only_linear")(out, x, case.weight.packed, bias, *case.weight.format)
    assert wide[:, outputs:].isnan().all(), "wrote beyond the last output"
    return out


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linear(name: str, form: QuantizedFormat, dtype: torch.dtype) -> None:
    for number, (rows, outputs) in enumerate([(1, 33), (7, 64), (9, 40), (17, 32)]):
        case, x = make_case(form, outputs), make_rows(rows, dtype)
        bias = torch.randn(outputs, generator=generator(1)).to(dtype) if number % 2 else None
        expected = x.double() @ case.values.t() + (0.0 if bias is None else bias.double())
        assert relative_error(multiply(name, case, x, bias), expected) < BOUND[dtype]


@pytest.mark.parametrize("name", on_cuda()[1:])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(name: str, bits: int) -> None:
    case, x = make_case(QuantizedFormat(bits, 64), 40), make_rows(32, torch.bfloat16)
    together = multiply(name, case, x, None)
    for rows in range(1, 32):
        assert torch.equal(multiply(name, case, x[-rows:], None), together[-rows:])


@pytest.mark.parametrize("name", on_cuda()[1:])
def test_many_panels_share_a_block(name: str) -> None:
    """So many outputs that a block takes two and four panels; the last one has fewer."""
    x = make_rows(1, torch.bfloat16)[:, :40].contiguous()
    for outputs in (257 * 32 - 1, 513 * 32 - 1):
        case = make_case(QuantizedFormat(4, 32, MINIMA), outputs, inputs=40)
        product = multiply(name, case, x, None)
        assert relative_error(product, x.double() @ case.values.t()) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_dequantize(name: str, form: QuantizedFormat) -> None:
    case = make_case(form, 70)
    for dtype in CUDA_DTYPES:
        out = nan_like(torch.empty(64, case.weight.padded_inputs, dtype=dtype))
        with backend(name) as op:
            op("dequantize_weight")(out, case.weight.packed, 32, 70, *case.weight.format)
        assert torch.equal(out[:38, :INPUTS], case.values[32:].float().to(dtype))


@pytest.mark.parametrize("form", [QuantizedFormat(4, 32), per_output(INPUTS)], ids=str)
def test_rounded_as_on_a_cpu(form: QuantizedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
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
