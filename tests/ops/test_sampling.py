from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch

from .cases import BACKENDS, DTYPES, ISAS, backend, generator
from .sampling_cases import EDGES, parameter_tensors, random_case, tied_logits

NAMES = list(itertools.product(BACKENDS, DTYPES))


def exact_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """The distribution by its definition, one token after another."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((x - max(logits)) / temperature) for x in logits]
    if top_k:
        order = order[:top_k]
    mass = sum(weight[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        kept.append(i)
        reached += weight[i]
        if top_p < 1 and reached >= top_p * mass:
            break
    kept = [i for i in kept if weight[i] >= min_p]
    mass = sum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(logits))]


def _run(name: str, logits: torch.Tensor, *parameters: object) -> torch.Tensor:
    tensors = parameter_tensors(logits.shape[0], *parameters)
    out = torch.full((logits.shape[0],), -7, dtype=torch.int64)
    with backend(name) as op:
        op("sample_tokens")(out, logits, *tensors)
    return out


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 100, 1003, 32000])
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_argmax_takes_the_lowest_of_equals(name: str, dtype: torch.dtype, vocab_size: int) -> None:
    logits, expected = tied_logits(40, vocab_size, dtype)
    out = torch.full((40,), -7, dtype=torch.int64)
    with backend(name) as op:
        op("argmax")(out, logits)
    assert out.tolist() == expected


SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 0, 1.0, 0.15),
    (1.5, 9, 0.9, 0.1),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_frequencies_follow_the_exact_distribution(
    name: str, dtype: torch.dtype, setting: tuple
) -> None:
    draws, vocab_size = 20_000, 24
    gen = generator(11)
    row = (torch.randn(vocab_size, generator=gen) * 1.5).to(dtype)
    probabilities = exact_probabilities(row.float().tolist(), *setting)
    uniform = torch.rand(draws, generator=gen, dtype=torch.float64)
    out = _run(name, row.expand(draws, -1).contiguous(), *setting, uniform)
    counts = torch.bincount(out, minlength=vocab_size).tolist()
    kept = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in kept) == draws, "a filtered token was sampled"
    chi_square = sum(
        (counts[i] - draws * probabilities[i]) ** 2 / (draws * probabilities[i]) for i in kept
    )
    freedom = len(kept) - 1
    # five standard deviations of the statistic: under one in a hundred thousand by chance
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("vocab_size", [7, 128, 1237, 40_000])
@pytest.mark.parametrize(("name", "dtype"), list(itertools.product(ISAS, DTYPES)), ids=str)
def test_kernels_choose_what_the_sorted_reference_chooses(
    name: str, dtype: torch.dtype, vocab_size: int
) -> None:
    case = random_case(48, vocab_size, dtype)
    assert torch.equal(_run(name, *case), _run("reference", *case))


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
