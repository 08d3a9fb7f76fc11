"""Argmax and sampling: every kernel against the sorted reference and the exact distribution."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from support.distributions import exact_probabilities, p_value
from support.matrix import matrix
from torch import Tensor

from .cases import CUDA_DTYPES, DTYPES, ISAS, NAMES, backend, generator, on_cuda

CUDA = on_cuda(*CUDA_DTYPES)
each_kernel = pytest.mark.parametrize(
    ("name", "dtype"), [*itertools.product(ISAS, DTYPES), *CUDA], ids=str
)
INF = float("inf")
PARAMETER_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
"""Of temperature, top_k, top_p, min_p and uniform."""
Sample = Callable[..., Tensor]
"""Returns the ids chosen from logits by the five parameters; a number serves all rows."""


def parameter_tensors(rows: int, *parameters: object) -> list[Tensor]:
    """The five parameters, those that are numbers as tensors."""
    return [
        p if isinstance(p, Tensor) else torch.full((rows,), p, dtype=dtype)
        for p, dtype in zip(parameters, PARAMETER_DTYPES, strict=True)
    ]


def assert_logprobs(logprobs: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """They are those of the chosen tokens in the softmax of the logits, without any filter."""
    exact = logits.double().log_softmax(-1).gather(1, token_ids.unsqueeze(1))[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=2e-6, rtol=2e-6, equal_nan=True)


def random_case(rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits with bans, and parameters of which each is neutral in some rows."""
    gen = generator(vocab_size)
    logits = (torch.randn(rows, vocab_size, generator=gen) * 3).to(dtype)  # bfloat16: many ties
    logits[::7, ::3] = -INF
    temperature = torch.rand(rows, generator=gen) * 2
    temperature[5] = 0.0
    top_k = torch.randint(0, 2 * vocab_size, (rows,), generator=gen, dtype=torch.int32)
    top_k[::3] = 0
    few = top_k[1::3]
    few.copy_(torch.randint(1, min(60, vocab_size), few.shape, generator=gen))
    top_p, min_p = torch.rand(rows, generator=gen), torch.rand(rows, generator=gen) * 0.2
    top_p[::4], min_p[::2] = 1.0, 0.0
    uniform = torch.rand(rows, generator=gen, dtype=torch.float64)
    return logits, temperature, top_k, top_p, min_p, uniform


def tied_logits(rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Strided logits with most maxima tied, and the first place of each row's maximum."""
    wide = torch.full((rows, vocab_size + 5), INF, dtype=dtype)
    logits = wide[:, :vocab_size]
    logits.copy_(torch.randint(-3, 4, (rows, vocab_size), generator=generator(vocab_size)))
    logits[0] = -INF
    logits[1, vocab_size // 2] = INF
    logits[3], logits[3, 0] = -0.0, 0.0
    first = [values.index(max(values)) for values in logits.tolist()]
    logits[2, vocab_size - 1] = float("nan")
    first[2] = vocab_size - 1
    return logits, first


def ties_at_the_threshold_keep_the_lowest_ids(sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.zeros(8, 1500, dtype=dtype)
    logits[:, 1400] = 1.0
    uniform = torch.linspace(0, 1, 9, dtype=torch.float64)[:-1]
    # token 1400 weighs e, the others 1: (e + 3) / (e + 1499) is the mass of four tokens
    top_p = (math.e + 2.5) / (math.e + 1499)

    def chosen(*parameters: float) -> set[int]:
        return set(sample(logits, 1.0, *parameters, uniform).tolist())

    assert chosen(4, 1.0, 0.0) == {0, 1, 2, 1400}
    assert chosen(0, top_p, 0.0) == {0, 1, 2, 1400}
    assert chosen(0, 1.0, 0.5) == chosen(0, 1.0, 2.0) == {1400}
    # top-p within what top-k left: half of four
    assert chosen(4, 0.5, 0.0) <= {0, 1400}
    logits[:, 17] = 1.0
    assert chosen(0, 1.0, 1.0) == {17, 1400}


def ends_of_the_uniform(sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.full((4, 300), -INF, dtype=dtype)
    logits[:, [17, 18, 250]] = 0.0
    uniform = torch.tensor([0.0, 1 / 3 + 1e-9, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert sample(logits, 1.0, 0, 1.0, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert sample(logits, 1.0, 200, 0.999, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert sample(logits, 1.0, 0, 0.0, 0.0, uniform).tolist() == [17] * 4


def rows_without_a_finite_maximum_give_their_argmax(sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0] = -INF
    logits[1, 31] = INF
    logits[2, 12] = float("nan")
    assert sample(logits, 1.0, 0, 0.9, 0.0, 0.99).tolist() == [0, 31, 12]


def extreme_temperatures(sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 9.9e3]], dtype=dtype)
    for temperature in (0.0, 1e-38, 1e-6, 1e-3):
        assert sample(logits, temperature, 0, 1.0, 0.0, 0.999).tolist() == [0]
    assert sample(logits, 1e30, 0, 1.0, 0.0, 0.999).tolist() == [3]


EDGES: tuple[Callable[[Sample, torch.dtype], None], ...] = (
    ties_at_the_threshold_keep_the_lowest_ids,
    ends_of_the_uniform,
    rows_without_a_finite_maximum_give_their_argmax,
    extreme_temperatures,
)


def _run(name: str, logits: torch.Tensor, *parameters: object) -> torch.Tensor:
    tensors = parameter_tensors(logits.shape[0], *parameters)
    out = torch.full((logits.shape[0],), -7, dtype=torch.int64)
    again, logprobs = out.clone(), torch.full((logits.shape[0],), 7.0)
    with backend(name) as op:
        op("sample_tokens")(out, logits, *tensors, logprobs)
        op("sample_tokens")(again, logits, *tensors)
    assert_logprobs(logprobs, logits, out)
    assert torch.equal(again, out)
    return out


def _check(name: str, logits: torch.Tensor, *parameters: object) -> None:
    """The kernel chooses what the sorted reference chooses."""
    assert torch.equal(_run(name, logits, *parameters), _run("reference", logits, *parameters))


@pytest.mark.parametrize(("name", "dtype"), [*NAMES, *CUDA], ids=str)
def test_argmax_takes_the_lowest_of_equals(name: str, dtype: torch.dtype) -> None:
    for vocab_size in (1, 3, 16, 100, 1003, 32000):
        logits, expected = tied_logits(7, vocab_size, dtype)
        out = torch.full((7,), -7, dtype=torch.int64)
        again, logprobs = out.clone(), torch.full((7,), 7.0)
        with backend(name) as op:
            op("argmax")(out, logits, logprobs)
            op("argmax")(again, logits)
        assert out.tolist() == again.tolist() == expected
        assert_logprobs(logprobs, logits, out)


SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.15),
    (1.5, 9, 0.9, 0.1),
]


@pytest.mark.parametrize(("setting", "backend_and_dtype"), matrix(SETTINGS, NAMES), ids=str)
def test_frequencies_follow_the_exact_distribution(
    setting: tuple, backend_and_dtype: tuple[str, torch.dtype]
) -> None:
    name, dtype = backend_and_dtype
    draws, vocab_size = 20_000, 24
    gen = generator(11)
    row = (torch.randn(vocab_size, generator=gen) * 1.5).to(dtype)
    temperature, top_k, top_p, min_p = setting
    fields = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    exact = exact_probabilities(row.float(), fields | ({"top_k": top_k} if top_k else {}))
    uniform = torch.rand(draws, generator=gen, dtype=torch.float64)
    out = _run(name, row.expand(draws, -1).contiguous(), *setting, uniform)
    counts = torch.bincount(out, minlength=vocab_size)
    assert not counts[exact == 0].any(), "a filtered token was sampled"
    assert p_value(counts, exact) > 1e-5


@each_kernel
def test_kernels_choose_what_the_sorted_reference_chooses(name: str, dtype: torch.dtype) -> None:
    # Warps that run ahead of each other take ten times as long.
    longest = 40_000 if name != "stand-in wide" else 6000 if dtype == torch.float32 else 1237
    for vocab_size in {7, 128, 1237, longest}:
        _check(name, *random_case(12, vocab_size, dtype))


@each_kernel
def test_rows_begin_and_end_anywhere(name: str, dtype: torch.dtype) -> None:
    gen = generator(3)
    last = 16 // dtype.itemsize - 1
    for at, vocab_size in ((0, 1), (0, 300), (1, 6), (1, 33), (1, 300), (last, 33), (last, 300)):
        stride = vocab_size + 3
        around = torch.full((4 * stride + at,), float("nan"), dtype=dtype)
        logits = around[at:].view(4, stride)[:, :vocab_size]
        logits.copy_(torch.randn(4, vocab_size, generator=gen) * 2)
        uniform = torch.rand(4, generator=gen, dtype=torch.float64)
        top_k = torch.tensor([0, 0, 3, 3], dtype=torch.int32)
        _check(name, logits, 0.9, top_k, torch.tensor([1.0, 0.8, 1.0, 0.8]), 0.0, uniform)
        _check(name, logits, 0.0, 0, 1.0, 0.0, 0.5)


@pytest.mark.parametrize("name", [*ISAS, *on_cuda()[1:]])
def test_more_tokens_around_the_border_than_a_list_holds(name: str) -> None:
    logits = torch.zeros(6, 5000)
    logits[3:] = torch.randn(3, 5000, generator=generator(4)) * 0.001  # one coarse bin, no equals
    logits[:, 4321] = 0.1
    top_k = torch.tensor([3000, 0, 4000] * 2, dtype=torch.int32)
    top_p = torch.tensor([1.0, 0.7, 0.9] * 2)
    for uniform in (0.3, 1 - 2**-53):
        _check(name, logits, 1.0, top_k, top_p, 0.0, uniform)


@pytest.mark.parametrize("name", [*ISAS, *on_cuda()[1:]])
def test_top_p_of_what_top_k_left(name: str) -> None:
    """Few tokens are taken from the list of a GPU, many from the row."""
    for top_k in (40, 2049) if name == "stand-in wide" else (40, 2048, 2049):
        gen = generator(top_k)
        logits = torch.randn(5, 6000, generator=gen).bfloat16()
        top_p = torch.tensor([0.0, 0.3, 0.9, 0.999, 1 - 2**-24])
        uniform = torch.rand(5, generator=gen, dtype=torch.float64)
        _check(name, logits, 1.5, top_k, top_p, 0.0, uniform)
        logits[:, 30:] = -INF  # fewer than k are not banned
        _check(name, logits, 1.5, top_k, top_p, 0.0, uniform)


@pytest.mark.parametrize("name", ISAS)
def test_a_row_is_the_same_alone_and_in_a_crowd(name: str) -> None:
    gen = generator(5)
    logits = torch.randn(30, 5000, generator=gen)
    parameters = (
        torch.rand(30, generator=gen) + 0.1,
        torch.arange(30, dtype=torch.int32) * 3,
        torch.linspace(0.2, 1.0, 30),
        torch.zeros(30),
        torch.rand(30, generator=gen, dtype=torch.float64),
    )
    together = _run(name, logits, *parameters)
    for row in range(30):
        alone = _run(name, logits[row : row + 1], *(p[row : row + 1] for p in parameters))
        assert alone == together[row]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
@pytest.mark.parametrize(("name", "dtype"), [*NAMES, *on_cuda(torch.float32)], ids=str)
def test_edges(name: str, dtype: torch.dtype, edge: Callable[..., None]) -> None:
    edge(functools.partial(_run, name), dtype)
