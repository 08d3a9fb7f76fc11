"""Draws through the public API: their distribution, their seeds, their degenerate cases."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from support.distributions import exact_probabilities, p_value
from support.engines import generate, ids, open_llm, outputs_of, preemptions
from support.matrix import only
from support.models import ModelShop
from support.step_log import log_steps
from support.zoo import PLAIN, ZOO

from tpengine import SamplingParams
from tpengine.config import EMBEDDED_MODEL

NUM_DRAWS = 4000
MIN_P_VALUE = 1e-3

DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 1.3, "top_k": 12},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "min_p": {"temperature": 1.3, "min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
}


@pytest.mark.parametrize("name", only(("plain", "all"), DISTRIBUTIONS))
def test_first_tokens_follow_the_softmax(models: ModelShop, name: str) -> None:
    fields = DISTRIBUTIONS[name]
    folder = models.folder(PLAIN)
    oracle = models.oracle(folder)
    prompt = oracle.prompts([7], seed=1)[0]
    exact = exact_probabilities(oracle.next_logprobs(prompt), fields)
    params = [SamplingParams(max_tokens=1, seed=seed, **fields) for seed in range(NUM_DRAWS)]
    outputs = outputs_of(folder, [prompt] * NUM_DRAWS, params, max_num_batched_tokens=2048)
    tokens = [drawn[0] for drawn in ids(outputs)]
    counts = torch.bincount(torch.tensor(tokens), minlength=len(exact))
    assert int((counts > 0).sum()) >= 5
    assert counts[exact == 0].sum() == 0, "a token that was cut off was drawn"
    assert p_value(counts, exact) > MIN_P_VALUE
    warmer = exact_probabilities(
        oracle.next_logprobs(prompt), {**fields, "temperature": fields["temperature"] * 1.5}
    )
    assert p_value(counts, warmer) < MIN_P_VALUE, "the test could not tell a wrong temperature"


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=["top_k", "top_p", "min_p"]
)
def test_only_the_likeliest_left_equals_greedy(models: ModelShop, fields: dict[str, Any]) -> None:
    folder, oracle, prompts = models.problem(PLAIN, (1, 17, 64, 129), seed=1)
    params = SamplingParams(temperature=1.5, max_tokens=64, ignore_eos=True, **fields)
    oracle.assert_greedy(prompts, ids(outputs_of(folder, prompts, params)))


SEEDED = [
    SamplingParams(temperature=0.9, seed=seed, max_tokens=48, ignore_eos=True)
    for seed in (0, 1, 2**63, 12345)
]


@pytest.mark.parametrize(
    ("model", "dtype", "mode"),
    only(
        [("random", "float32", "recompute"), ("embedded", "bfloat16", "swap")],
        itertools.product(("random", "embedded"), ("float32", "bfloat16"), ("recompute", "swap")),
    ),
)
def test_same_seed_alone_crowded_and_preempted(
    models: ModelShop, model: str, dtype: str, mode: str
) -> None:
    folder = EMBEDDED_MODEL if model == "embedded" else models.folder(ZOO["d96-7to1-llama3"])
    prompts = models.oracle(folder).prompts((5, 21, 40, 80), seed=4)
    rng = random.Random(5)
    crowd = [[rng.randrange(3, 512) for _ in range(length)] for length in range(3, 63)]
    others = SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True)
    with open_llm(folder, dtype=dtype) as llm:
        alone = [ids(generate(llm, [p], s))[0] for p, s in zip(prompts, SEEDED, strict=True)]
    everyone = crowd[:30] + prompts + crowd[30:]
    params = [others] * 30 + SEEDED + [others] * 30
    with log_steps() as log, open_llm(folder, dtype=dtype, max_num_batched_tokens=128) as llm:
        in_crowd = ids(generate(llm, everyone, params))[30:34]
    assert log.max_rows == 64
    assert log.num_partial_chunks > 0
    assert in_crowd == alone
    tight = {"max_model_len": 256, "num_device_blocks_override": 32, "preemption_mode": mode}
    with log_steps() as log, open_llm(folder, dtype=dtype, **tight) as llm:
        outputs = generate(llm, everyone, params)
    assert preemptions(outputs[30:34]) > 0
    log.assert_only(mode)
    assert ids(outputs[30:34]) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_seed_decides(models: ModelShop) -> None:
    folder = models.folder(PLAIN)
    prompt = models.oracle(folder).prompts([17], seed=1)[0]

    def draws(engine_seed: int) -> list[tuple[int, ...]]:
        fields = {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True}
        params = [SamplingParams(seed=seed, **fields) for seed in (1, 1, 2, None, None)]
        with open_llm(folder, seed=engine_seed) as llm:
            return [ids(generate(llm, [prompt], own))[0] for own in params]

    first, again, other = map(draws, (7, 7, 8))
    assert first == again, "an engine's seed and the order of arrival fix every draw"
    assert first[0] == first[1] == other[0]
    assert len({tuple(tokens) for tokens in (*first[1:], *other[3:])}) == 6
    assert first[0] != models.oracle(folder).answers([prompt])[0].token_ids[:32]
