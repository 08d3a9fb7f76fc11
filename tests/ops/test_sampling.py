from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from support.distributions import exact_probabilities, p_value
from support.matrix import matrix

from .cases import BACKENDS, DTYPES, ISAS, backend, generator
from .sampling_cases import EDGES, assert_logprobs, parameter_tensors, random_case, tied_logits

NAMES = list(itertools.product(BACKENDS, DTYPES))


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


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 100, 1003, 32000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax_takes_the_lowest_of_equals(dtype: torch.dtype, vocab_size: int) -> None:
    logits, expected = tied_logits(40, vocab_size, dtype)
    for name in BACKENDS:
        out = torch.full((40,), -7, dtype=torch.int64)
        again, logprobs = out.clone(), torch.full((40,), 7.0)
        with backend(name) as op:
            op("argmax")(out, logits, logprobs)
            op("argmax")(again, logits)
        assert out.tolist() == again.tolist() == expected, name
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


@pytest.mark.parametrize("vocab_size", [7, 128, 1237, 40_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_choose_what_the_sorted_reference_chooses(
    dtype: torch.dtype, vocab_size: int
) -> None:
    case = random_case(48, vocab_size, dtype)
    expected = _run("reference", *case)
    for name in ISAS:
        assert torch.equal(_run(name, *case), expected), name


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
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_edges(name: str, dtype: torch.dtype, edge: Callable[..., None]) -> None:
    edge(functools.partial(_run, name), dtype)
