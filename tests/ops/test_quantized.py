"""Weights in groups of 4 and 8 bits: every instruction set and the reference, bit for bit against
integers that never saw the packed layout."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from support.rounded_rows import limits_of, quantize_weight
from torch import Tensor

from tpengine.ops import quantized_ops, quantized_reference
from tpengine.ops.quantized_ops import NO_OFFSETS, ZERO_POINTS, QuantizedFormat

from .cases import (
    BACKENDS,
    DTYPES,
    EMULATED,
    ISAS,
    backend,
    generator,
    nan_like,
    relative_error,
    threads,
)

FORMATS = {
    **{f"int4 g{size}": QuantizedFormat(4, size) for size in (32, 64, 128)},
    "int4 g32 zeros": QuantizedFormat(4, 32, ZERO_POINTS),
    "int4 g128 zeros": QuantizedFormat(4, 128, ZERO_POINTS),
    "int4 g32 minima": QuantizedFormat(4, 32, quantized_ops.MINIMA),
    "int4 g64 minima": QuantizedFormat(4, 64, quantized_ops.MINIMA),
    "int8 g32": QuantizedFormat(8, 32),
    "int8 g32 zeros": QuantizedFormat(8, 32, ZERO_POINTS),
    "int8 g64 minima": QuantizedFormat(8, 64, quantized_ops.MINIMA),
    "int8 per output": quantized_ops.per_output(290),
    "int8 per output zeros": quantized_ops.per_output(290)._replace(offsets=ZERO_POINTS),
}
# rows around the blocks of 2 and 6 and the sets of 384, outputs around panels
SHAPES = [(1, 1), (2, 31), (3, 64), (5, 33), (6, 32), (7, 65), (13, 100), (70, 40), (390, 34)]
INPUTS = 290  # no whole number of groups, and odd pairs


@dataclass(frozen=True)
class Case:
    """Random rows and a random weight whose padding is poisoned.

    Attributes:
        x: a view of a wider tensor full of NaN.
        q: what is stored, int64 `[outputs, INPUTS]`.
        scales, offsets: `[outputs, groups]`, float16; no offsets: zeros.
        weight: packed; outputs beyond the last have scales of NaN, and inputs beyond the last any
            numbers.
    """

    x: Tensor
    q: Tensor
    scales: Tensor
    offsets: Tensor
    bias: Tensor
    weight: quantized_ops.QuantizedWeight


def make_case(form: QuantizedFormat, rows: int, outputs: int, dtype: torch.dtype) -> Case:
    gen = generator(rows * 1000 + outputs)
    groups, whole = form.num_groups(INPUTS), -(-outputs // 32) * 32
    x = torch.full((rows, INPUTS + 6), float("nan"), dtype=dtype)[:, :INPUTS]
    x[:] = torch.randn(rows, INPUTS, generator=gen) * torch.logspace(0, 3, rows).unsqueeze(1)
    x[:, 8:10] *= 30.0
    x[::2, -1] *= 90.0
    x[-1, 1:] = 0.0
    size = (whole, groups * form.group_size)
    q = torch.randint(0, 1 << form.bits, size, generator=gen, dtype=torch.uint8)
    scales = (torch.randn(whole, groups, generator=gen) * 0.01).half()
    scales[0] = 0.0
    scales[outputs:] = float("nan")
    if form.offsets == ZERO_POINTS:
        offsets = torch.randint(0, 1 << form.bits, scales.shape, generator=gen).half()
    else:
        offsets = torch.randn(scales.shape, generator=gen).half()
    packed = quantized_ops.empty_quantized(*q.shape, form)
    own_offsets = None if form.offsets == NO_OFFSETS else offsets
    quantized_ops.pack_quantized_into(packed, q, scales, own_offsets)
    weight = replace(packed, out_features=outputs, in_features=INPUTS)
    bias = torch.randn(outputs, generator=gen).to(dtype)
    return Case(x, q[:outputs, :INPUTS].long(), scales[:outputs], offsets[:outputs], bias, weight)


def middle_of(form: QuantizedFormat) -> int:
    """What is stored for 0 where there are no offsets."""
    return 8 if form.bits == 4 else 128


def once_rounded(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def product(case: Case, with_bias: bool) -> Tensor:
    """`x W^T` by the definition of the formats, in integers within a group, float32."""
    form, x = case.weight.format, case.x.float()
    limit = limits_of(x)
    a = (x * torch.where(limit > 0, torch.tensor(127.0) / limit, 0.0)).round().long()
    high = torch.zeros_like(a)
    for four in range(0, INPUTS, 4):
        beyond = x[:, four : four + 4].abs().amax(1, keepdim=True) > limit
        high[:, four : four + 4] = (a[:, four : four + 4] / 128).round().long() * beyond
    total = torch.zeros(len(x), len(case.q))
    numbers = case.q - (middle_of(form) if form.offsets == NO_OFFSETS else 0)
    for g, first in enumerate(range(0, INPUTS, form.group_size)):
        inputs = (a - 128 * high)[:, first : first + form.group_size]
        q, scale = numbers[:, first : first + form.group_size], case.scales[:, g].float()
        total = once_rounded((inputs @ q.t()).float(), scale, total)
        offset = case.offsets[:, g].float()
        if form.offsets == ZERO_POINTS:
            offset = -offset * scale
        if form.offsets != NO_OFFSETS:
            inputs = a[:, first : first + form.group_size]
            total = once_rounded(inputs.sum(1, keepdim=True).float(), offset, total)
    is_whole = form.group_size > INPUTS and form.offsets == NO_OFFSETS
    apart = torch.zeros_like(total)
    for first in range(0, INPUTS, INPUTS if is_whole else 4):
        place = slice(first, INPUTS if is_whole else first + 4)
        scale = case.scales[:, first // form.group_size].float()
        apart = once_rounded((high[:, place] @ numbers[:, place].t()).float(), scale, apart)
    total = once_rounded(apart, torch.tensor(128.0), total)
    bias = case.bias.float() if with_bias else torch.zeros(len(case.bias))
    return once_rounded(total, limit / 127.0, bias)


@functools.cache
def problem(kind: str, rows: int, outputs: int, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """A case and its product, with a bias if the number of rows is odd."""
    case = make_case(FORMATS[kind], rows, outputs, dtype)
    return case, product(case, bool(rows % 2)).to(dtype)


def arguments(weight: quantized_ops.QuantizedWeight) -> tuple[int, int, int]:
    return weight.format.bits, weight.format.group_size, weight.format.offsets


def padded_out(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return nan_like(torch.empty(rows, size + 5, dtype=dtype))


@pytest.mark.parametrize("name", [*BACKENDS, EMULATED])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_integers_bit_for_bit(name: str, kind: str, dtype: torch.dtype) -> None:
    for rows, outputs in SHAPES:
        case, expected = problem(kind, rows, outputs, dtype)
        out = padded_out(rows, outputs, dtype)
        bias = case.bias if rows % 2 else None
        with backend(name) as op, threads(1 if rows < 10 else 2):
            op("quantized_linear")(
                out[:, :outputs], case.x, case.weight.packed, bias, *arguments(case.weight)
            )
        assert torch.equal(out[:, :outputs], expected)
        assert out[:, outputs:].isnan().all(), "wrote beyond the last output"


@pytest.mark.parametrize("name", [*ISAS, EMULATED])
def test_every_number_of_rows_gives_the_same_bits(name: str) -> None:
    case = make_case(FORMATS["int4 g32"], 70, 200, torch.bfloat16)
    expected = product(case, False).to(torch.bfloat16)
    with backend(name) as op, threads(2):
        for rows in range(71):
            out = torch.empty(rows, 200, dtype=torch.bfloat16)
            x = case.x[70 - rows :]
            op("quantized_linear")(out, x, case.weight.packed, None, *arguments(case.weight))
            assert torch.equal(out, expected[70 - rows :])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(name: str, kind: str, dtype: torch.dtype) -> None:
    form = FORMATS[kind]
    case = make_case(form, 1, 70, dtype)
    q = case.q.float()
    scales, offsets = (
        values.float().repeat_interleave(form.group_size, 1)[:, :INPUTS]
        for values in (case.scales, case.offsets)
    )
    if form.offsets == quantized_ops.MINIMA:
        table = once_rounded(q, scales, offsets)
    else:
        table = (q - (offsets if form.offsets == ZERO_POINTS else middle_of(form))) * scales
    ids = torch.tensor([69, 0, 31, 32, 69, 15, 16, 5], dtype=torch.int32)
    out = padded_out(len(ids), INPUTS, dtype)
    with backend(name) as op:
        op("quantized_embedding")(
            out[:, :INPUTS], case.weight.packed, ids, 70, *arguments(case.weight), 1.5
        )
    assert torch.equal(out[:, :INPUTS], (table[ids.long()] * 1.5).to(dtype))
    assert out[:, INPUTS:].isnan().all()
    with backend(name) as op:  # a part with ids 40 to 109
        place = case.weight.packed, ids + 9, 70, *arguments(case.weight), 1.5, 40
        op("quantized_embedding")(out[:, :INPUTS], *place)
    is_there = (ids + 9 >= 40).unsqueeze(1)
    expected = (table[(ids - 31).clamp(min=0).long()] * 1.5).to(dtype) * is_there
    assert torch.equal(out[:, :INPUTS], expected)


def dequantized(weight: quantized_ops.QuantizedWeight) -> Tensor:
    out = torch.empty(weight.out_features, weight.in_features)
    ids = torch.arange(weight.out_features, dtype=torch.int32)
    with backend("reference") as op:
        op("quantized_embedding")(
            out, weight.packed, ids, weight.out_features, *arguments(weight), 1.0
        )
    return out


def test_rounding_loses_less_than_the_largest_magnitude_alone() -> None:
    weight = torch.randn(70, INPUTS, generator=generator(1))
    actual = dequantized(quantize_weight(weight, FORMATS["int4 g32"]))
    groups = torch.nn.functional.pad(weight, (0, 30)).view(70, -1, 32)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    plain = ((groups / (extreme / -8)).round().clamp(-8, 7) * (extreme / -8)).view(70, -1)
    assert relative_error(actual, weight) < 0.95 * relative_error(plain[:, :INPUTS], weight)
    assert relative_error(actual, weight) < 0.083
    for kind in ("int8 g32", "int8 per output"):
        assert relative_error(dequantized(quantize_weight(weight, FORMATS[kind])), weight) < 0.008


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_the_same_everywhere(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(70, INPUTS, generator=generator(2)) * torch.logspace(-7, 9, 70)[:, None]
    weight = weight.to(dtype)
    weight[3] = 0.0
    counts = torch.logspace(-6, 6, INPUTS)[torch.randperm(INPUTS, generator=generator(3))]
    forms = (FORMATS[kind] for kind in FORMATS if FORMATS[kind].offsets == NO_OFFSETS)
    for form, importance in itertools.product(forms, (None, counts)):
        with backend("reference") as op:
            expected = quantize_weight(weight, form).packed.clone()
            op("quantize_weight")(expected, weight, importance, form.bits, form.group_size)
        with backend(name):
            assert torch.equal(quantize_weight(weight, form, importance).packed, expected)


def test_inputs_that_count_more_lose_less() -> None:
    weight, importance = torch.randn(64, INPUTS, generator=generator(8)), torch.ones(INPUTS)
    importance[::16] = 1000.0
    form = FORMATS["int4 g32"]
    plain, weighted = (
        dequantized(quantize_weight(weight, form, counts)) - weight for counts in (None, importance)
    )
    assert weighted[:, ::16].square().mean() < 0.3 * plain[:, ::16].square().mean()
    assert weighted.square().mean() < 4 * plain.square().mean()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["int4 g32", "int4 g32 minima", "int8 g32", "int8 per output"])
def test_what_is_not_finite_stays_so(name: str, kind: str) -> None:
    """Of an input it takes its row, of a weight its output, and no other."""
    form, gen = FORMATS[kind], generator(6)
    for place, fault in ((0, float("nan")), (17, float("inf")), (INPUTS - 1, -float("inf"))):
        case = make_case(form, 7, 40, torch.float32)
        expected = product(case, with_bias=False)
        case.x[2, place] = fault
        out = torch.empty(7, 40)
        with backend(name) as op:
            op("quantized_linear")(out, case.x, case.weight.packed, None, *arguments(case.weight))
        assert out[2].isnan().all()
        assert torch.equal(out[3:], expected[3:])
        if form.offsets == NO_OFFSETS:
            weight = torch.randn(40, INPUTS, generator=gen)
            weight[5, place] = fault
            with backend(name) as op:
                packed = quantize_weight(weight, form).packed
                op("quantize_weight")(packed, weight, None, form.bits, form.group_size)
                op("quantized_linear")(out[3:], case.x[3:], packed, None, *arguments(case.weight))
            assert not out[3:, 5].isfinite().any()
            assert out[3:, :5].isfinite().all()


def test_scales_beyond_float16_are_infinite() -> None:
    weight = torch.randn(64, 64, generator=generator(7)) * torch.logspace(0, 12, 64)[:, None]
    for form in (FORMATS["int4 g32"], FORMATS["int8 g32"]):
        actual = dequantized(quantize_weight(weight, form))
        is_held = weight.abs().amax(1) / (8 if form.bits == 4 else 127) < 60000.0
        assert actual[is_held].isfinite().all()
        assert not actual[weight.abs().amax(1) > 1e8].isfinite().all(1).any()


def test_rounding_keeps_zeros_and_tiny_weights() -> None:
    weight = torch.zeros(33, 64)
    weight[1] = 3e-5 * torch.linspace(-1, 1, 64)
    for kind in ("int4 g32", "int8 g32"):
        actual = dequantized(quantize_weight(weight, FORMATS[kind]))
        assert not actual[0].any()
        assert relative_error(actual[1], weight[1]) < 0.3


@pytest.mark.parametrize(
    ("layout", "blocks"), [(0, (16, 32)), (1, (16, 32)), (2, (16, 16)), (3, (2, 128))], ids=str
)
def test_numbers_of_a_file_are_packed_as_by_the_reference(
    layout: int, blocks: tuple[int, int]
) -> None:
    """Into 40 outputs, which are no whole panels, from a file's blocks with factors between."""
    gen, bits = generator(layout), 8 if layout == quantized_reference.SIGNED else 4
    most = 16 if layout == quantized_reference.NUMBERS else 256
    numbers = torch.randint(0, most, (40, *blocks), generator=gen, dtype=torch.uint8)
    wider = torch.cat([numbers, torch.full((40, blocks[0], 4), 255, dtype=torch.uint8)], dim=2)
    factors = torch.randn(2, 40, 16, 2, generator=gen).half().unbind(3)[0]
    arguments = (*factors, bits, 32, layout)
    expected = torch.empty(2 * 16 * (32 * 4 * bits + 128), dtype=torch.uint8)
    packed = torch.full_like(expected, 255)
    quantized_reference.pack_groups(expected, numbers, *arguments)
    torch.ops.tpengine.pack_groups(packed, wider[..., : blocks[1]], *arguments)
    assert torch.equal(packed, expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("block_type", "block_bytes"), [(13, 176), (14, 210)])
def test_superblocks_have_the_values_of_the_library(block_type: int, block_bytes: int) -> None:
    """Bit for bit, also infinities; the file has other bytes between the rows."""
    shape, gen = (40, 7, block_bytes), generator(block_type)
    wider = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
    expected, actual = torch.empty(2, 40, 5 * 256).unbind()
    quantized_reference.dequantize_blocks(expected, wider[:, 1:6], block_type)
    torch.ops.tpengine.dequantize_blocks(actual, wider[:, 1:6], block_type)
    assert torch.equal(actual.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(actual[is_number], expected[is_number])
