"""Reported log probabilities are those of transformers' raw logits, to 1e-4."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.distributions import exact_probabilities
from support.engines import generate, greedy, open_llm, outputs_of
from support.matrix import only
from support.models import ModelShop
from support.zoo import PLAIN, ZOO

from tpengine import SamplingParams

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", only(("d80-1to1-linear-old", "d96-7to1-llama3"), ZOO))
def test_chosen_and_top_logprobs(models: ModelShop, name: str) -> None:
    folder, oracle, prompts = models.clear_problem(ZOO[name], (1, 17, 129, 300), seed=1)
    outputs = outputs_of(folder, prompts, greedy(logprobs=5), max_num_batched_tokens=64)
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
    folder, oracle, prompts = models.clear_problem(PLAIN, (7, 64), seed=1)
    params = SamplingParams(
        temperature=2.0, top_k=20, top_p=0.9, seed=5, max_tokens=24, min_tokens=24, logprobs=0
    )
    outputs = outputs_of(folder, prompts, params)
    ranks = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert len(completion.token_ids) == 24
        for i, token_id in enumerate(completion.token_ids):
            exact = oracle.next_logprobs([*prompt, *completion.token_ids[:i]])
            entries = completion.logprobs[i]
            assert list(entries) == [token_id]
            assert entries[token_id].logprob == pytest.approx(float(exact[token_id]), abs=TOLERANCE)
            assert entries[token_id].rank == 1 + int((exact > exact[token_id]).sum())
            ranks.add(entries[token_id].rank)
    assert len(ranks) > 5, "nothing but the likeliest was drawn"


def test_processed_logprobs_of_outputs_and_prompts(models: ModelShop) -> None:
    """As vLLM 0.5.4 reported them: after temperature and truncation, of prompts too. They make the
    cumulative log probability, and so the ranking of best_of."""
    folder, oracle, prompts = models.clear_problem(PLAIN, (7, 64), seed=1)
    fields = {"temperature": 1.5, "top_k": 20}
    params = SamplingParams(
        **fields, seed=5, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2
    )
    alike = replace(params, n=3, best_of=None, prompt_logprobs=None)
    with open_llm(folder, logprobs_mode="processed_logprobs") as llm:
        outputs = generate(llm, prompts, params)
        all_three = generate(llm, prompts, alike)
        ranked = generate(llm, prompts, replace(alike, n=1, best_of=3, logprobs=None))
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        tokens = [*prompt, *completion.token_ids]
        entries = [*output.prompt_logprobs, *completion.logprobs]
        for place in range(1, len(tokens)):  # the token itself, then the likeliest by rank
            others = [i for i in entries[place] if i != tokens[place]]
            assert list(entries[place]) == [tokens[place], *others]
            assert [entries[place][i].rank for i in others] in ([1, 2], [1], [2])
        for place in (1, 3, *range(len(prompt), len(tokens))):
            exact = exact_probabilities(oracle.next_logprobs(tokens[:place]), fields).log()
            logprob = entries[place][tokens[place]].logprob
            assert logprob == pytest.approx(float(exact[tokens[place]]), abs=TOLERANCE)
        own = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True) if entry]
        assert completion.cumulative_logprob == pytest.approx(sum(own[len(prompt) - 1 :]), abs=1e-5)
    for three, best in zip(all_three, ranked, strict=True):
        top = max(three.outputs, key=lambda completion: completion.cumulative_logprob)
        assert best.outputs[0].token_ids == top.token_ids
        assert best.outputs[0].cumulative_logprob == pytest.approx(top.cumulative_logprob, abs=1e-5)
