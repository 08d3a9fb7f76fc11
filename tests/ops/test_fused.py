from __future__ import annotations

import itertools

import pytest
import torch

from .cases import (
    BACKENDS,
    DTYPES,
    backend,
    generator,
    hugging_face_norm,
    nan_like,
    relative_error,
)

NAMES = list(itertools.product(BACKENDS, DTYPES))
SIZES = [1, 16, 45, 64, 896, 2049]
BOUND = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_rms_norm(name: str, dtype: torch.dtype, size: int) -> None:
    gen = generator(size)
    wide = torch.full((9, size + 3), float("nan"), dtype=dtype)
    wide[:, 2 : 2 + size] = torch.randn(9, size, generator=gen).to(dtype) * 3
    x = wide[:, 2 : 2 + size]
    weight = torch.randn(size, generator=gen)
    out = torch.full((9, size), float("nan"), dtype=dtype)
    with backend(name) as op:
        for one in (weight, weight.to(dtype)):
            op("rms_norm")(out, x, one, 1e-5)
            expected = hugging_face_norm(x, one, 1e-5)
            assert relative_error(out, expected) < BOUND[dtype] / (2 if one is weight else 1)
        op("rms_norm")(x, x, weight.to(dtype), 1e-5)  # in place
    assert torch.equal(x, out)
    assert wide[:, :2].isnan().all()
    assert wide[:, 2 + size :].isnan().all()


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_rms_norm_per_head_on_a_view_of_packed_qkv(name: str, dtype: torch.dtype) -> None:
    gen = generator(7)
    qkv = torch.randn(5, 10, 80, generator=gen).to(dtype)
    before = qkv.clone()
    weight = torch.randn(80, generator=gen).to(dtype)
    with backend(name) as op:
        op("rms_norm")(qkv[:, :6], qkv[:, :6], weight, 1e-6)
    expected = hugging_face_norm(before[:, :6], weight, 1e-6)
    assert relative_error(qkv[:, :6], expected) < BOUND[dtype]
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_add_rms_norm(name: str, dtype: torch.dtype, size: int) -> None:
    gen = generator(size)
    x, residual = (torch.randn(33, size, generator=gen).to(dtype) for _ in range(2))
    weight = torch.randn(size, generator=gen).to(dtype)
    total = x + residual
    out = nan_like(x)
    with backend(name) as op:
        op("add_rms_norm")(out, x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert relative_error(out, hugging_face_norm(total, weight, 1e-5)) < BOUND[dtype]


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """In float64."""
    y = x.double()
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", "nothing"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_layer_norm(name: str, dtype: torch.dtype, size: int, given: str) -> None:
    """Strided rows far from zero, for which a difference of sums would be inexact."""
    gen = generator(size)
    wide = torch.full((33, size + 3), float("nan"), dtype=dtype)
    wide[:, 2 : 2 + size] = torch.randn(33, size, generator=gen) * 3 + 50
    x = wide[:, 2 : 2 + size]
    weight = torch.randn(size, generator=gen).to(dtype) if "weight" in given else None
    bias = torch.randn(size, generator=gen).to(dtype) if "bias" in given else None
    out = torch.full((33, size), float("nan"), dtype=dtype)
    with backend(name) as op:
        op("layer_norm")(out, x, weight, bias, 1e-5)
        expected = _layer_norm(x, weight, bias, 1e-5)
        # The precision of differences from the mean in float32.
        largest = 1.0 if weight is None else float(weight.abs().max())
        spread = float((x.double().var(-1, unbiased=False) + 1e-5).sqrt().min())
        allowed = 1.2e-7 * float(x.abs().max()) / spread * largest
        assert (out.double() - expected).abs().max() < allowed + BOUND[dtype] * expected.abs().max()
        op("layer_norm")(x, x, weight, bias, 1e-5)  # in place
    assert torch.equal(x, out)
    assert wide[:, :2].isnan().all()
    assert wide[:, 2 + size :].isnan().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_add_layer_norm(name: str, dtype: torch.dtype, size: int) -> None:
    gen = generator(size)
    x, residual = (torch.randn(33, size, generator=gen).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size, generator=gen).to(dtype) for _ in range(2))
    total = x + residual
    out = nan_like(x)
    with backend(name) as op:
        op("add_layer_norm")(out, x, residual, weight, bias, 1e-5)
        again = total - x
        op("add_layer_norm")(x, x, again, None, None, 1e-5)  # into x itself
    assert torch.equal(residual, total)
    assert relative_error(out, _layer_norm(total, weight, bias, 1e-5)) < BOUND[dtype]
    if size > 1:
        assert relative_error(x, _layer_norm(again, None, None, 1e-5)) < BOUND[dtype]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_accumulate(name: str, dtype: torch.dtype, size: int) -> None:
    gen = generator(size)
    total, x = (torch.randn(33, size, generator=gen).to(dtype) for _ in range(2))
    expected, before = total + x, x.clone()
    with backend(name) as op:
        op("accumulate")(total, x)
    assert torch.equal(total, expected)
    assert torch.equal(x, before)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_plain_activations(name: str, dtype: torch.dtype, activation: str, size: int) -> None:
    """In place, on strided rows."""
    gen = generator(size)
    wide = torch.full((17, size + 3), float("nan"), dtype=dtype)
    x = wide[:, 2 : 2 + size]
    x.copy_(torch.randn(17, size, generator=gen) * 4)
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, -0.0  # saturated, and exp's ends
    x[3, -1] = float("nan")
    before = x.double()
    with backend(name) as op:
        op(activation)(x)
    expected = ACTIVATIONS[activation](before)
    assert x[3, -1].isnan()
    x[3, -1] = before[3, -1] = expected[3, -1] = 0
    assert relative_error(x, expected) < BOUND[dtype]
    allowed = 4e-7 * before.abs() + 2 * BOUND[dtype] * expected.abs()
    assert ((x.double() - expected).abs() <= allowed).all()
    assert wide[:, :2].isnan().all()
    assert wide[:, 2 + size :].isnan().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_gated_activations(name: str, dtype: torch.dtype, activation: str, size: int) -> None:
    gen = generator(size)
    x = (torch.randn(17, 2 * size, generator=gen) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, -0.0  # saturated, and exp's ends
    out = torch.full((17, size), float("nan"), dtype=dtype)
    with backend(name) as op:
        op(f"{activation}_and_mul")(out, x)
    gate, up = x.double().chunk(2, dim=-1)
    expected = ACTIVATIONS[activation](gate) * up
    assert relative_error(out, expected) < BOUND[dtype]
    allowed = 4e-7 * (gate * up).abs() + 2 * BOUND[dtype] * expected.abs()
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("rotary_dim", [2, 24, 48, 64])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_rotary_embedding(name: str, dtype: torch.dtype, is_neox: bool, rotary_dim: int) -> None:
    gen = generator(rotary_dim)
    half = rotary_dim // 2
    angle = torch.arange(60)[:, None] * torch.rand(half, generator=gen)
    table = torch.cat([angle.cos(), angle.sin()], dim=-1)
    qkv = torch.randn(11, 8, 64, generator=gen).to(dtype)
    positions = torch.randint(0, 60, (11,), generator=gen, dtype=torch.int32)
    expected = qkv.double()
    cos, sin = table.double()[positions.long()][:, None].chunk(2, dim=-1)
    for i in range(half):
        a, b = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        c, s = cos[..., i], sin[..., i]
        x, y = qkv[:, :6, a].double(), qkv[:, :6, b].double()
        expected[:, :6, a], expected[:, :6, b] = x * c - y * s, y * c + x * s
    before = qkv.clone()
    with backend(name) as op:
        op("rotary_embedding")(positions, qkv[:, :4], qkv[:, 4:6], table, is_neox)
    assert relative_error(qkv, expected) < BOUND[dtype]
    assert torch.equal(qkv[:, 6:], before[:, 6:])
    assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_embedding(name: str, dtype: torch.dtype) -> None:
    """From a table with strided rows."""
    gen = generator(3)
    wide = torch.full((40, 24), float("nan"), dtype=dtype)
    table = wide[:, 3:]
    table.copy_(torch.randn(40, 21, generator=gen))
    ids = torch.randint(0, 40, (3000,), generator=gen, dtype=torch.int32)
    out = torch.full((3000, 21), float("nan"), dtype=dtype)
    with backend(name) as op:
        for scale in (1.0, 5.3):
            op("embedding")(out, table, ids, scale)
            assert torch.equal(out, table[ids.long()] * scale)
