from __future__ import annotations

import itertools

import pytest
import torch

from .cases import CUDA_DTYPES, NAMES, backend, generator, nan_like, on_cuda, relative_error

SIZES = [1, 16, 45, 64, 896, 2049]
WITH_LONG = [*SIZES, 9000]
"""And one longer than what the threads of a GPU keep."""
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
each_backend = pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
each_backend_and_cuda = pytest.mark.parametrize(
    ("name", "dtype"), [*NAMES, *on_cuda(*CUDA_DTYPES)], ids=str
)


class Framed:
    """Values as columns of a tensor whose other columns are NaN and must stay so."""

    def __init__(self, values: torch.Tensor, dtype: torch.dtype) -> None:
        self._whole = torch.full((len(values), values.shape[1] + 3), float("nan"), dtype=dtype)
        self.x = self._whole[:, 2:-1]
        self.x.copy_(values)

    def check(self) -> None:
        assert self._whole[:, :2].isnan().all()
        assert self._whole[:, -1].isnan().all()


def _pair(rows: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, rows, size, generator=generator(size)).to(dtype)
    return x.clone(), y.clone()


def hugging_face_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm as Hugging Face's models write it, with float64 in place of float32."""
    y = x.double()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    # A float32 weight is Gemma's: rounded once, at the end.
    return weight.double() * y.to(weight.dtype).double()


@each_backend_and_cuda
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    for size in WITH_LONG:
        gen = generator(size)
        framed = Framed(torch.randn(9, size, generator=gen) * 3, dtype)
        weight = torch.randn(size, generator=gen)
        x, out = framed.x, nan_like(torch.empty(9, size, dtype=dtype))
        with backend(name) as op:
            for own, bound in ((weight, BOUND[dtype] / 2), (weight.to(dtype), BOUND[dtype])):
                op("rms_norm")(out, x, own, 1e-5)
                assert relative_error(out, hugging_face_norm(x, own, 1e-5)) < bound, size
            op("rms_norm")(x, x, weight.to(dtype), 1e-5)  # in place
        assert torch.equal(x, out)
        framed.check()


@each_backend_and_cuda
def test_rms_norm_per_head_on_a_view_of_packed_qkv(name: str, dtype: torch.dtype) -> None:
    gen = generator(7)
    qkv = torch.randn(5, 10, 80, generator=gen).to(dtype)
    before = qkv.clone()
    weight = torch.randn(80, generator=gen).to(dtype)
    with backend(name) as op:
        op("rms_norm")(qkv[:, :6], qkv[:, :6], weight, 1e-6)
    assert relative_error(qkv[:, :6], hugging_face_norm(before[:, :6], weight, 1e-6)) < BOUND[dtype]
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@each_backend_and_cuda
def test_add_rms_norm(name: str, dtype: torch.dtype) -> None:
    for size in WITH_LONG:
        x, residual = _pair(9, size, dtype)
        total, weight, out = x + residual, _pair(1, size, dtype)[0][0], nan_like(x)
        with backend(name) as op:
            op("add_rms_norm")(out, x, residual, weight, 1e-5)
        assert torch.equal(residual, total)
        assert relative_error(out, hugging_face_norm(total, weight, 1e-5)) < BOUND[dtype], size


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    y = x.double()
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


@each_backend
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "bias", "nothing"])
def test_layer_norm(name: str, dtype: torch.dtype, parts: str) -> None:
    for size in SIZES:
        gen = generator(size)
        framed = Framed(torch.randn(33, size, generator=gen) * 3 + 50, dtype)
        x, out = framed.x, nan_like(torch.empty(33, size, dtype=dtype))
        weight = torch.randn(size, generator=gen).to(dtype) if "weight" in parts else None
        bias = torch.randn(size, generator=gen).to(dtype) if "bias" in parts else None
        with backend(name) as op:
            op("layer_norm")(out, x, weight, bias, 1e-5)
            expected = _layer_norm(x, weight, bias, 1e-5)
            # Numbers around 50 lose digits when their mean is taken away, in any order of sums.
            largest = 1.0 if weight is None else float(weight.abs().max())
            spread = float((x.double().var(-1, unbiased=False) + 1e-5).sqrt().min())
            allowed = 1.2e-7 * float(x.abs().max()) / spread * largest
            error = (out.double() - expected).abs().max()
            assert error < allowed + BOUND[dtype] * expected.abs().max(), size
            op("layer_norm")(x, x, weight, bias, 1e-5)  # in place
        assert torch.equal(x, out)
        framed.check()


@each_backend
def test_add_layer_norm(name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, residual = _pair(33, size, dtype)
        weight, bias = _pair(1, size, dtype)
        weight, bias, total, out = weight[0], bias[0], x + residual, nan_like(x)
        with backend(name) as op:
            op("add_layer_norm")(out, x, residual, weight, bias, 1e-5)
            again = total - x
            op("add_layer_norm")(x, x, again, None, None, 1e-5)  # into x itself
        assert torch.equal(residual, total)
        assert relative_error(out, _layer_norm(total, weight, bias, 1e-5)) < BOUND[dtype], size
        if size > 1:  # of one number only the sign of a rounding error would be left
            assert relative_error(x, _layer_norm(again, None, None, 1e-5)) < BOUND[dtype], size


@each_backend
def test_accumulate(name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        total, x = _pair(33, size, dtype)
        expected, before = total + x, x.clone()
        with backend(name) as op:
            op("accumulate")(total, x)
        assert torch.equal(total, expected)
        assert torch.equal(x, before)


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def _assert_close(out: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, what: object) -> None:
    """Close as a whole, and each number for itself, also where it is tiny."""
    bound = BOUND[out.dtype]
    assert relative_error(out, expected) < bound, what
    info = torch.finfo(out.dtype)  # float16 rounds tiny numbers to multiples of its smallest one
    allowed = 4e-7 * x.double().abs() + 2 * bound * expected.abs() + info.tiny * info.eps
    assert ((out.double() - expected).abs() <= allowed).all(), what


@each_backend
def test_plain_activations(name: str, dtype: torch.dtype) -> None:
    for activation, size in itertools.product(ACTIVATIONS, SIZES):
        framed = Framed(torch.randn(17, size, generator=generator(size)) * 4, dtype)
        x = framed.x
        x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, -0.0  # saturated, and exp's ends
        x[3, -1] = float("nan")
        before = x.double()
        with backend(name) as op:
            op(activation)(x)
        assert x[3, -1].isnan()
        x[3, -1] = before[3, -1] = 0
        _assert_close(x, ACTIVATIONS[activation](before), before, (activation, size))
        framed.check()


@each_backend_and_cuda
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    for activation, size in itertools.product(["silu", "gelu", "gelu_tanh"], SIZES):
        x = (torch.randn(17, 2 * size, generator=generator(size)) * 4).to(dtype)
        x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, -0.0  # saturated, and exp's ends
        out = nan_like(torch.empty(17, size, dtype=dtype))
        with backend(name) as op:
            op(f"{activation}_and_mul")(out, x)
        gate, up = x.double().chunk(2, dim=-1)
        _assert_close(out, ACTIVATIONS[activation](gate) * up, gate * up, (activation, size))


@each_backend
def test_embedding(name: str, dtype: torch.dtype) -> None:
    gen = generator(3)
    table = Framed(torch.randn(40, 21, generator=gen), dtype).x
    ids = torch.randint(0, 40, (3000,), generator=gen, dtype=torch.int32)
    out = nan_like(torch.empty(3000, 21, dtype=dtype))
    with backend(name) as op:
        for scale in (1.0, 5.3):
            op("embedding")(out, table, ids, scale)
            assert torch.equal(out, table[ids.long()] * scale)
            op("embedding")(out, table[:20], ids + 80, scale, 90)  # has ids 90 to 109 of 80 to 119
            is_there = (ids >= 10) & (ids < 30)
            expected = table[(ids - 10).clamp(0, 19).long()] * scale
            assert torch.equal(out, expected * is_there.unsqueeze(1))
