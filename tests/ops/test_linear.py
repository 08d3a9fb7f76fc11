"""Packed linear layers: every instruction set against float64, and independence of the batch."""

from __future__ import annotations

import pytest
import torch

from tpengine.ops.linear_ops import pack_linear_weight

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

BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}
# rows around the blocks of 3, 4, 6, 10 and 12, outputs around the panels of 32, halves and pairs
SHAPES = [
    (1, 64, 32), (2, 2, 1), (3, 96, 31), (8, 40, 65), (9, 34, 97), (12, 34, 33), (13, 128, 64),
    (5, 34, 49), (7, 66, 40), (18, 2, 65), (25, 66, 70), (40, 256, 100), (0, 64, 32),
]  # fmt: skip


def _case(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, inputs, outputs = shape
    gen = generator(rows * 1000 + outputs)
    return (
        torch.randn(rows, inputs, generator=gen).to(dtype),
        torch.randn(outputs, inputs, generator=gen).to(dtype),
        torch.randn(outputs, generator=gen).to(dtype),
    )


@pytest.mark.parametrize("name", [*BACKENDS, EMULATED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_a_product_in_float64(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    x, weight, bias = _case(shape, dtype)
    # a strided input and output, as views of wider tensors have
    wide = torch.full((x.shape[0], x.shape[1] + 6), float("nan"), dtype=dtype)
    wide[:, : x.shape[1]] = x
    out = nan_like(torch.empty(x.shape[0], weight.shape[0] + 5, dtype=dtype))
    with backend(name) as op:
        packed = nan_like(pack_linear_weight(weight))
        op("pack_linear_weight")(packed, weight)
        result = out[:, : weight.shape[0]]
        op("packed_linear")(result, wide[:, : x.shape[1]], packed, bias if with_bias else None)
    expected = x.double() @ weight.double().t()
    if with_bias:
        expected += bias.double()
    assert relative_error(result, expected) < BOUND[dtype]
    assert out[:, weight.shape[0] :].isnan().all(), "wrote beyond the last output"


@pytest.mark.parametrize("name", [*ISAS, EMULATED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(50, 320, 200), (150, 3200, 33)], ids=str)
def test_a_row_is_the_same_bits_alone_and_in_a_crowd(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """Tiles take 128 rows of 3,200 inputs at once: the others come in another set."""
    x, weight, bias = _case(shape, dtype)
    packed, count = pack_linear_weight(weight), shape[0]
    with backend(name) as op:
        whole = nan_like(x.new_empty(count, shape[2]))
        with threads(2):
            op("packed_linear")(whole, x, packed, bias)
        for rows in (slice(0, 1), slice(7, 20), slice(127, 129), slice(count - 1, count)):
            part = x.new_empty(x[rows].shape[0], shape[2])
            op("packed_linear")(part, x[rows], packed, bias)
            assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("name", [EMULATED, *(isa for isa in ISAS if isa == "amx")])
def test_tiles_add_in_their_documented_order(name: str) -> None:
    """Even and odd inputs of 32 are summed apart, then both sums are added, as Intel's manual says.

    So the emulated tiles of other machines give the bits of the processor's own.
    """
    x, weight, bias = _case((37, 80, 70), torch.bfloat16)
    total = bias.float().expand(37, 70)
    for first in range(0, 80, 32):
        sums = [torch.zeros(37, 70), torch.zeros(37, 70)]
        for k in range(first, min(first + 32, 80)):
            products = x[:, k, None].double() * weight[:, k].double()  # exact
            sums[k % 2] = (products + sums[k % 2]).float()
        total = total + (sums[0] + sums[1])
    out = x.new_empty(37, 70)
    with backend(name) as op:
        op("packed_linear")(out, x, pack_linear_weight(weight), bias)
    assert torch.equal(out, total.bfloat16())


@pytest.mark.parametrize("name", ISAS)
def test_odd_inputs_in_bfloat16_are_refused(name: str) -> None:
    weight = torch.zeros(4, 3, dtype=torch.bfloat16)
    with backend(name), pytest.raises(RuntimeError, match="3 inputs; expected an even number"):
        pack_linear_weight(weight)
