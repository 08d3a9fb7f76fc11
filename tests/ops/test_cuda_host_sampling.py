"""The CUDA sampling kernels' own source on the CPU stand-in, against the sorted reference."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from tpengine.ops import reference

from .cases import generator
from .cuda_host_library import I32, I64, P, load_host, needs_compiler, set_schedule, struct

pytestmark = needs_compiler

LogitsArgs = struct(("out", P), ("logits", P), ("stride", I64), ("vocab_size", I32))
SampleArgs = struct(
    ("logits", LogitsArgs), ("temperature", P), ("top_k", P), ("top_p", P), ("min_p", P),
    ("uniform", P),
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = float("inf")


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_host("sampling")


def _run(kernels: ctypes.CDLL, logits: Tensor, *parameters: object) -> Tensor:
    """Parameters: temperature, top_k, top_p, min_p, uniform; a number serves all rows."""
    rows = logits.shape[0]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    tensors = [
        p if isinstance(p, Tensor) else torch.full((rows,), p, dtype=dtype)
        for p, dtype in zip(parameters, dtypes, strict=True)
    ]
    out = torch.full((rows,), -7, dtype=torch.int64)
    row = LogitsArgs(out.data_ptr(), logits.data_ptr(), logits.stride(0), logits.shape[1])
    args = SampleArgs(row, *[tensor.data_ptr() for tensor in tensors])
    kernels.sample_tokens(DTYPES.index(logits.dtype), ctypes.byref(args), rows)
    expected = torch.full_like(out, -7)
    reference.sample_tokens(expected, logits, *tensors)
    assert torch.equal(out, expected)
    return out


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_takes_the_lowest_of_equals(
    kernels: ctypes.CDLL, dtype: torch.dtype, seed: int
) -> None:
    set_schedule(kernels, seed)
    for vocab_size in (1, 100, 1003):
        wide = torch.full((5, vocab_size + 5), INF, dtype=dtype)
        logits = wide[:, :vocab_size]
        logits.copy_(torch.randint(-3, 4, (5, vocab_size), generator=generator(vocab_size)))
        logits[0] = -INF
        logits[1, vocab_size // 2] = INF
        logits[2, vocab_size - 1] = float("nan")
        logits[3], logits[3, 0] = -0.0, 0.0
        out = torch.full((5,), -7, dtype=torch.int64)
        args = LogitsArgs(out.data_ptr(), logits.data_ptr(), logits.stride(0), vocab_size)
        kernels.argmax(DTYPES.index(dtype), ctypes.byref(args), 5)
        for row in range(5):
            values = logits[row].tolist()
            expected = vocab_size - 1 if row == 2 else values.index(max(values))
            assert out[row] == expected


@pytest.mark.parametrize("vocab_size", [7, 1237, 6000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_chooses_what_the_sorted_reference_chooses(
    kernels: ctypes.CDLL, dtype: torch.dtype, vocab_size: int
) -> None:
    gen = generator(vocab_size)
    set_schedule(kernels, 1)
    rows = 9
    logits = (torch.randn(rows, vocab_size, generator=gen) * 3).to(dtype)  # bfloat16: many ties
    logits[::7, ::3] = -INF
    temperature = torch.rand(rows, generator=gen) * 2
    temperature[5] = 0.0
    top_k = torch.randint(0, 2 * vocab_size, (rows,), generator=gen, dtype=torch.int32)
    top_k[::3] = 0
    top_k[1::3] = torch.randint(1, min(60, vocab_size), (3,), generator=gen, dtype=torch.int32)
    top_p = torch.rand(rows, generator=gen)
    top_p[::4] = 1.0
    min_p = torch.rand(rows, generator=gen) * 0.2
    min_p[::2] = 0.0
    uniform = torch.rand(rows, generator=gen, dtype=torch.float64)
    _run(kernels, logits, temperature, top_k, top_p, min_p, uniform)


def test_ties_at_the_threshold_keep_the_lowest_ids(kernels: ctypes.CDLL) -> None:
    set_schedule(kernels, 2)
    logits = torch.zeros(8, 1500)
    logits[:, 1400] = 1.0
    uniform = torch.linspace(0, 1, 9, dtype=torch.float64)[:-1]
    kept = {0, 1, 2, 1400}
    assert set(_run(kernels, logits, 1.0, 4, 1.0, 0.0, uniform).tolist()) == kept
    # token 1400 weighs e, the others 1: (e + 3) / (e + 1499) is the mass of four tokens
    top_p = (math.e + 2.5) / (math.e + 1499)
    assert set(_run(kernels, logits, 1.0, 0, top_p, 0.0, uniform).tolist()) == kept
    assert set(_run(kernels, logits, 1.0, 0, 1.0, 0.5, uniform).tolist()) == {1400}
    assert set(_run(kernels, logits.roll(5, 1), 1.0, 0, 1.0, 2.0, uniform).tolist()) == {1405}
    logits[:, 17] = 1.0
    assert set(_run(kernels, logits, 1.0, 0, 1.0, 1.0, uniform).tolist()) == {17, 1400}
    logits[:, 17] = 0.0
    # top-p within what top-k left: half of four
    assert set(_run(kernels, logits, 1.0, 4, 0.5, 0.0, uniform).tolist()) <= {0, 1400}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_begin_and_end_anywhere(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    gen = generator(3)
    set_schedule(kernels, 1)
    for offset in range(16 // dtype.itemsize):
        for vocab_size in (1, 6, 33, 300):
            stride = vocab_size + 3
            around = torch.full((4 * stride + offset,), float("nan"), dtype=dtype)
            logits = around[offset:].view(4, stride)[:, :vocab_size]
            logits.copy_(torch.randn(4, vocab_size, generator=gen) * 2)
            uniform = torch.rand(4, generator=gen, dtype=torch.float64)
            top_k = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
            top_p = torch.tensor([1.0, 0.8, 1.0, 0.8])
            _run(kernels, logits, 0.9, top_k, top_p, 0.0, uniform)
            _run(kernels, logits, 0.0, 0, 1.0, 0.0, 0.5)


def test_more_tokens_around_the_border_than_the_list_holds(kernels: ctypes.CDLL) -> None:
    set_schedule(kernels, 1)
    gen = generator(4)
    logits = torch.zeros(6, 5000)
    logits[3:] = torch.randn(3, 5000, generator=gen) * 0.001  # one coarse bin, no equals
    logits[:, 4321] = 0.1
    top_k = torch.tensor([3000, 0, 4000] * 2, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.7, 0.9] * 2)
    for uniform in (0.3, 1 - 2**-53):
        _run(kernels, logits, 1.0, top_k, top_p, 0.0, uniform)


@pytest.mark.parametrize("top_k", [40, 2048, 2049, 5500])
def test_top_p_of_what_top_k_left(kernels: ctypes.CDLL, top_k: int) -> None:
    """Few tokens are taken from the list, many from the row."""
    set_schedule(kernels, 1)
    gen = generator(top_k)
    logits = torch.randn(5, 6000, generator=gen).bfloat16()
    top_p = torch.tensor([0.0, 0.3, 0.9, 0.999, 1 - 2**-24])
    uniform = torch.rand(5, generator=gen, dtype=torch.float64)
    _run(kernels, logits, 1.5, top_k, top_p, 0.0, uniform)
    logits[:, 30:] = -INF  # fewer than k are not banned
    _run(kernels, logits, 1.5, top_k, top_p, 0.0, uniform)


def test_ends_of_the_uniform_and_rows_without_a_finite_maximum(kernels: ctypes.CDLL) -> None:
    set_schedule(kernels, 0)
    logits = torch.full((4, 300), -INF)
    logits[:, [17, 18, 250]] = 0.0
    uniform = torch.tensor([0.0, 1 / 3 + 1e-9, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert _run(kernels, logits, 1.0, 0, 1.0, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert _run(kernels, logits, 1.0, 200, 0.999, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert _run(kernels, logits, 1.0, 0, 0.0, 0.0, uniform).tolist() == [17] * 4
    logits = torch.zeros(3, 50)
    logits[0] = -INF
    logits[1, 31] = INF
    logits[2, 12] = float("nan")
    assert _run(kernels, logits, 1.0, 0, 0.9, 0.0, 0.99).tolist() == [0, 31, 12]


def test_extreme_temperatures(kernels: ctypes.CDLL) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 9.9e3]])
    for temperature in (0.0, 1e-38, 1e-6, 1e-3):
        assert _run(kernels, logits, temperature, 0, 1.0, 0.0, 0.999).tolist() == [0]
    assert _run(kernels, logits, 1e30, 0, 1.0, 0.0, 0.999).tolist() == [3]


def test_a_row_is_the_same_under_every_schedule(kernels: ctypes.CDLL) -> None:
    gen = generator(5)
    logits = torch.randn(3, 5000, generator=gen)
    uniform = torch.rand(3, generator=gen, dtype=torch.float64)
    answers = set()
    for seed in (0, 1, 2):
        set_schedule(kernels, seed)
        answers.add(tuple(_run(kernels, logits, 0.9, 50, 0.9, 0.0, uniform).tolist()))
    assert len(answers) == 1
