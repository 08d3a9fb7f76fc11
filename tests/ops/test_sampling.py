from __future__ import annotations

import itertools
import math

import pytest
import torch

from .cases import BACKENDS, DTYPES, ISAS, backend, generator

NAMES = list(itertools.product(BACKENDS, DTYPES))
INF = float("inf")


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
    """Parameters: temperature, top_k, top_p, min_p, uniform; a number serves all rows."""
    rows = logits.shape[0]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float64)
    tensors = [
        p if isinstance(p, torch.Tensor) else torch.full((rows,), p, dtype=dtype)
        for p, dtype in zip(parameters, dtypes, strict=True)
    ]
    out = torch.full((rows,), -7, dtype=torch.int64)
    with backend(name) as op:
        op("sample_tokens")(out, logits, *tensors)
    return out


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 100, 1003, 32000])
@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_argmax_takes_the_lowest_of_equals(name: str, dtype: torch.dtype, vocab_size: int) -> None:
    gen = generator(vocab_size)
    wide = torch.full((40, vocab_size + 5), INF, dtype=dtype)
    logits = wide[:, :vocab_size]
    # few distinct values, so that most maxima are tied
    logits.copy_(torch.randint(-3, 4, (40, vocab_size), generator=gen))
    logits[0] = -INF
    logits[1, vocab_size // 2] = INF
    logits[2, vocab_size - 1] = float("nan")
    out = torch.full((40,), -7, dtype=torch.int64)
    with backend(name) as op:
        op("argmax")(out, logits)
    for row in range(40):
        values = logits[row].tolist()
        expected = vocab_size - 1 if row == 2 else values.index(max(values))
        assert out[row] == expected


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
    gen = generator(vocab_size)
    rows = 48
    logits = (torch.randn(rows, vocab_size, generator=gen) * 3).to(dtype)  # bfloat16: many ties
    logits[::7, ::3] = -INF
    temperature = torch.rand(rows, generator=gen) * 2
    temperature[5] = 0.0
    top_k = torch.randint(0, 2 * vocab_size, (rows,), generator=gen, dtype=torch.int32)
    top_k[::3] = 0
    top_k[1::3] = torch.randint(1, min(60, vocab_size), (16,), generator=gen, dtype=torch.int32)
    top_p = torch.rand(rows, generator=gen)
    top_p[::4] = 1.0
    min_p = torch.rand(rows, generator=gen) * 0.2
    min_p[::2] = 0.0
    uniform = torch.rand(rows, generator=gen, dtype=torch.float64)
    parameters = (temperature, top_k, top_p, min_p, uniform)
    assert torch.equal(_run(name, logits, *parameters), _run("reference", logits, *parameters))


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


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_ties_at_the_threshold_keep_the_lowest_ids(name: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(1000, 500, dtype=dtype)
    logits[:, 400] = 1.0
    uniform = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    assert set(_run(name, logits, 1.0, 4, 1.0, 0.0, uniform).tolist()) == {0, 1, 2, 400}
    # token 400 weighs e, the others 1: (e + 3) / (e + 499) is the mass of four tokens
    top_p = (math.e + 2.5) / (math.e + 499)
    assert set(_run(name, logits, 1.0, 0, top_p, 0.0, uniform).tolist()) == {0, 1, 2, 400}
    assert set(_run(name, logits, 1.0, 0, 1.0, 0.5, uniform).tolist()) == {400}


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_ends_of_the_uniform_and_banned_tokens(name: str, dtype: torch.dtype) -> None:
    logits = torch.full((4, 300), -INF, dtype=dtype)
    logits[:, [17, 18, 250]] = 0.0
    uniform = torch.tensor([0.0, 1 / 3 + 1e-9, 1 - 2**-53, 0.5], dtype=torch.float64)
    assert _run(name, logits, 1.0, 0, 1.0, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert _run(name, logits, 1.0, 200, 0.999, 0.0, uniform).tolist() == [17, 18, 250, 18]
    assert _run(name, logits, 1.0, 0, 0.0, 0.0, uniform).tolist() == [17] * 4


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_rows_without_a_finite_maximum_give_their_argmax(name: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0] = -INF
    logits[1, 31] = INF
    logits[2, 12] = float("nan")
    assert _run(name, logits, 1.0, 0, 0.9, 0.0, 0.99).tolist() == [0, 31, 12]


@pytest.mark.parametrize(("name", "dtype"), NAMES, ids=str)
def test_extreme_temperatures(name: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, 9.9e3]], dtype=dtype)
    for temperature in (0.0, 1e-38, 1e-6, 1e-3):
        assert _run(name, logits, temperature, 0, 1.0, 0.0, 0.999).tolist() == [0]
    assert _run(name, logits, 1e30, 0, 1.0, 0.0, 0.999).tolist() == [3]
