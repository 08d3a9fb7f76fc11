"""The CUDA sampling kernels' own source on the CPU stand-in, against the sorted reference."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tpengine.ops import reference

from .cases import generator
from .cuda_host_library import I32, I64, P, load_host, needs_compiler, pointer, set_schedule, struct
from .sampling_cases import (
    EDGES,
    INF,
    assert_logprobs,
    parameter_tensors,
    random_case,
    tied_logits,
)

pytestmark = needs_compiler

LogitsArgs = struct(
    ("out", P), ("logits", P), ("stride", I64), ("vocab_size", I32), ("logprobs", P)
)
SampleArgs = struct(
    ("logits", LogitsArgs), ("temperature", P), ("top_k", P), ("top_p", P), ("min_p", P),
    ("uniform", P),
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return load_host("sampling")


def _run(kernels: ctypes.CDLL, logits: Tensor, *parameters: object) -> Tensor:
    rows = logits.shape[0]
    tensors = parameter_tensors(rows, *parameters)
    out, logprobs = torch.full((rows,), -7, dtype=torch.int64), torch.full((rows,), 7.0)
    row = _row(out, logits, logprobs)
    args = SampleArgs(row, *[tensor.data_ptr() for tensor in tensors])
    kernels.sample_tokens(DTYPES.index(logits.dtype), ctypes.byref(args), rows)
    expected = torch.full_like(out, -7)
    reference.sample_tokens(expected, logits, *tensors)
    assert torch.equal(out, expected)
    assert_logprobs(logprobs, logits, out)
    return out


def _row(out: Tensor, logits: Tensor, logprobs: Tensor | None) -> ctypes.Structure:
    shape = logits.stride(0), logits.shape[1]
    return LogitsArgs(out.data_ptr(), logits.data_ptr(), *shape, pointer(logprobs))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_takes_the_lowest_of_equals(
    kernels: ctypes.CDLL, dtype: torch.dtype, seed: int
) -> None:
    set_schedule(kernels, seed)
    for vocab_size in (1, 100, 1003):
        logits, expected = tied_logits(5, vocab_size, dtype)
        for logprobs in (torch.full((5,), 7.0), None):
            out = torch.full((5,), -7, dtype=torch.int64)
            kernels.argmax(DTYPES.index(dtype), ctypes.byref(_row(out, logits, logprobs)), 5)
            assert out.tolist() == expected
            if logprobs is not None:
                assert_logprobs(logprobs, logits, out)


@pytest.mark.parametrize("vocab_size", [7, 1237, 6000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_chooses_what_the_sorted_reference_chooses(
    kernels: ctypes.CDLL, dtype: torch.dtype, vocab_size: int
) -> None:
    set_schedule(kernels, 1)
    _run(kernels, *random_case(9, vocab_size, dtype))


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
def test_edges(kernels: ctypes.CDLL, edge: Callable[..., None], seed: int) -> None:
    set_schedule(kernels, seed)
    edge(functools.partial(_run, kernels), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_begin_and_end_anywhere(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    gen = generator(3)
    set_schedule(kernels, 1)
    for offset in (0, 1, 16 // dtype.itemsize - 1):
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


def test_a_row_is_the_same_under_every_schedule(kernels: ctypes.CDLL) -> None:
    gen = generator(5)
    logits = torch.randn(3, 5000, generator=gen)
    uniform = torch.rand(3, generator=gen, dtype=torch.float64)
    answers = set()
    for seed in (0, 1, 2):
        set_schedule(kernels, seed)
        answers.add(tuple(_run(kernels, logits, 0.9, 50, 0.9, 0.0, uniform).tolist()))
    assert len(answers) == 1
