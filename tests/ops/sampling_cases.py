"""Logits and parameters for sampling, and what every implementation does at their edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .cases import generator

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
