"""Reported log probabilities are those of transformers' raw logits, to 1e-4."""

from __future__ import annotations

import pytest
from support.engines import generate, greedy, ids, open_llm
from support.models import ModelShop
from support.zoo import PLAIN, ZOO

from tpengine import SamplingParams

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", list(ZOO))
def test_chosen_and_top_logprobs(models: ModelShop, name: str) -> None:
    folder, oracle, prompts = models.problem(ZOO[name], (1, 17, 129, 300), seed=1)
    with open_llm(folder, max_num_batched_tokens=64) as llm:
        outputs = generate(llm, prompts, greedy(logprobs=5))
    for output, answer in zip(outputs, oracle.answers(prompts), strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == answer.token_ids
        total = 0.0
        assert len(completion.logprobs) == 64
        for entries, token_id, exact in zip(
            completion.logprobs, answer.token_ids, answer.logprobs, strict=True
        ):
            best = exact.topk(5)
            assert {e.rank for e in entries.values()} == {1, 2, 3, 4, 5}
            for rank, value in enumerate(best.values.tolist(), start=1):
                entry = next(e for e in entries.values() if e.rank == rank)
                assert entry.logprob == pytest.approx(value, abs=TOLERANCE)
            for candidate, entry in entries.items():
                assert entry.logprob == pytest.approx(float(exact[candidate]), abs=TOLERANCE)
            assert entries[token_id].rank == 1
            total += entries[token_id].logprob
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)


def test_logprobs_are_of_the_raw_logits(models: ModelShop) -> None:
    """Temperature, truncation and bans change what is drawn, not what is reported."""
    folder, oracle, prompts = models.problem(PLAIN, (7, 64), seed=1)
    params = SamplingParams(
        temperature=2.0, top_k=20, top_p=0.9, seed=5, max_tokens=24, min_tokens=24, logprobs=0
    )
    with open_llm(folder) as llm:
        outputs = generate(llm, prompts, params)
    ranks = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == 24
        for i, token_id in enumerate(completion.token_ids):
            exact = oracle.next_logprobs(prompt + completion.token_ids[:i])
            entries = completion.logprobs[i]
            assert list(entries) == [token_id]
            assert entries[token_id].logprob == pytest.approx(float(exact[token_id]), abs=TOLERANCE)
            assert entries[token_id].rank == 1 + int((exact > exact[token_id]).sum())
            ranks.add(entries[token_id].rank)
    assert len(ranks) > 5, "nothing but the likeliest was drawn"


def test_mixed_wishes_in_one_batch(models: ModelShop) -> None:
    folder, oracle, prompts = models.problem(PLAIN, (7, 16, 33, 64), seed=1)
    wishes = [None, 0, 1, 7]
    with open_llm(folder) as llm:
        outputs = generate(llm, prompts, [greedy(8, logprobs=wish) for wish in wishes])
    assert ids(outputs) == [answer.token_ids[:8] for answer in oracle.answers(prompts)]
    assert outputs[0].outputs[0].logprobs is None
    assert outputs[0].outputs[0].cumulative_logprob is None
    for output, wish in zip(outputs[1:], wishes[1:], strict=True):
        assert {len(entries) for entries in output.outputs[0].logprobs} == {max(1, wish)}
