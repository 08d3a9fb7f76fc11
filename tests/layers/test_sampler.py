"""Reported log probabilities: how many, by which logits, and the one that costs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.distributions import exact_probabilities
from support.edited_logits import edited

from tpengine.layers.sampler import (
    MAX_COMMON_TOP,
    highest,
    noise_keys,
    sample,
    token_logprobs,
)
from tpengine.messages import NewSequence, SamplingRules
from tpengine.worker.sampling_state import SamplingSlots

VOCAB_SIZE = 300
EDITS: dict[str, Any] = {"logit_bias": {7: 3.0}, "bad_words_token_ids": [[9]]}
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, **EDITS},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, **EDITS},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.02, **EDITS},
]
PENALISED = [2, 3, 4]


def _exact(logits: torch.Tensor, fields: dict[str, Any], processed: bool) -> torch.Tensor:
    """Log probabilities of one row by the textbook."""
    if processed:
        logits = edited(SamplingRules(**fields), PENALISED, len(PENALISED), logits)
    if processed and fields["temperature"] > 0.0:
        return exact_probabilities(logits, fields).log()
    return logits.double().log_softmax(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
def test_the_chosen_tokens_logprob_is_there_unasked(processed: bool, dtype: torch.dtype) -> None:
    """It equals the one that is reported on request, and the textbook's."""
    gen = torch.Generator().manual_seed(3)
    logits = (torch.randn(2 * len(WISHES), VOCAB_SIZE, generator=gen) * 2).to(dtype)
    slots = SamplingSlots(len(logits), torch.device("cpu"), processed)
    token_ids = np.zeros((len(logits), 8), np.int32)
    token_ids[:, :3] = PENALISED
    for slot in range(len(logits)):
        wish = WISHES[slot // 2] | {"logprobs": 2 if slot % 2 else None}
        new = NewSequence(slot, PENALISED, 3, 0, [], SamplingRules(**wish), 0, 0, [])
        slots.write(slot, new, noise_keys(5, slot // 2))
    logits[1::2] = logits[::2]
    rows = np.arange(len(logits))
    sampled = sample(logits.clone(), slots.gather(rows, np.full(len(rows), 3, np.int32), token_ids))
    findings = sampled.findings.now()
    for slot, token_id in enumerate(sampled.token_ids.tolist()):
        exact = _exact(logits[slot].float(), WISHES[slot // 2], processed)
        entry = findings.logprobs.get(slot)
        logprob = findings.chosen_logprobs[slot] if entry is None else entry.logprob
        assert logprob == pytest.approx(float(exact[token_id]), abs=1e-5), WISHES[slot // 2]
        if slot % 2:
            assert entry.rank == 1 + int((exact > exact[token_id] + 1e-6).sum())
            assert entry.top_logprobs == pytest.approx(exact.topk(2).values.tolist(), abs=1e-5)
    costly = {slot // 2 for slot in findings.logprobs if slot % 2 == 0}
    assert costly == ({4, 6, 7, 8, 9} if processed else set())


def test_logprobs_are_the_same_bits_beside_an_edited_row() -> None:
    count = 40
    logits = torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(6)) * 4
    token_ids = np.full((count, 8), 2, np.int32)
    answers = []
    for last in ({"temperature": 1.0}, EDITS):
        slots = SamplingSlots(count, torch.device("cpu"), False)
        for slot in range(count):
            # Bans that end before this position: the row has rules, but no edit.
            rules = {"temperature": 1.0, "min_tokens": 1} if slot < count - 1 else last
            new = NewSequence(slot, [2, 3], 1, 0, [], SamplingRules(**rules), 0, 0, [4])
            slots.write(slot, new, noise_keys(5, slot))
        batch = slots.gather(np.arange(count), np.full(count, 3, np.int32), token_ids)
        answers.append(sample(logits.clone(), batch).findings.now().chosen_logprobs[:-1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [1, 3, 17, 300])
def test_of_equally_likely_tokens_the_first_are_reported(count: int) -> None:
    """However many rows there are."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (40, 300), generator=generator).float()
    for rows in (scores, scores[:1], scores[7]):
        wanted = rows.sort(dim=-1, descending=True, stable=True)
        values, indexes = highest(rows, count)
        assert torch.equal(values, wanted.values[..., :count])
        assert torch.equal(indexes, wanted.indices[..., :count])


def test_any_number_of_tokens_is_reported() -> None:
    gen = torch.Generator().manual_seed(4)
    counts = [0, 3, MAX_COMMON_TOP, MAX_COMMON_TOP + 1, VOCAB_SIZE, (1 << 31) - 1, 1]
    shares = torch.randn(len(counts), VOCAB_SIZE, generator=gen).log_softmax(-1)
    chosen = torch.arange(len(counts))
    for row, entry in enumerate(token_logprobs(shares, chosen, counts).now()):
        expected = shares[row].sort(descending=True)
        count = min(counts[row], VOCAB_SIZE)
        assert entry.top_token_ids == expected.indices[:count].tolist()
        assert entry.top_logprobs == expected.values[:count].tolist()
        assert entry.logprob == float(shares[row, row])
        assert expected.indices[entry.rank - 1] == row


@pytest.mark.parametrize("neighbours", [{}, EDITS], ids=["plain", "edited"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("wish", [WISHES[0], WISHES[7] | {"logprobs": 2}, WISHES[2], {}], ids=str)
def test_a_row_whose_largest_logit_is_not_finite_is_an_error(
    wish: dict[str, Any], bad: float, neighbours: dict[str, Any]
) -> None:
    """And no other row is. Without a wish it is of a beam search."""
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
    logits[1, 5] = bad
    slots = SamplingSlots(3, torch.device("cpu"), False)
    for slot, fields in enumerate([neighbours, wish, neighbours]):
        new = NewSequence(slot, [2, 3], 1, 0, [], SamplingRules(**fields), 0, 0, [])
        new.num_candidates = 0 if wish or slot != 1 else 4
        slots.write(slot, new, noise_keys(5, slot))
    token_ids = np.full((3, 8), 2, np.int32)
    sampled = sample(logits, slots.gather(np.arange(3), np.full(3, 2, np.int32), token_ids))
    errors = sampled.findings.now().errors
    assert [row for row, error in errors.items() if "NaN or infinite" in error.text] == [1]
    assert len(errors) == 1
