"""Penalties, biases and bans in requests with more than one sequence: forks copy the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.byte_llama import END_TOKEN_ID, VOCAB_SIZE, make_engine, random_prompts, run
from support.edited_logits import edited
from support.oracle import Oracle
from support.step_log import log_steps

from tpengine import LLMEngine, SamplingParams
from tpengine.layers.sampler import noise_keys, uniform_noise
from tpengine.ops.fused_ops import sample_tokens

BIAS = {7: 1.5, 90: -4.0, 201: 1.0}
NUM_TOKENS = 20
TEMPERATURE = 0.9
BEAMS: dict[str, Any] = {"use_beam_search": True, "temperature": 0.0}


def _bad_words(prompts: list[list[int]]) -> list[list[int]]:
    """Returns single ids, and pairs whose first ids are a range, so that they occur often."""
    return [[50], *([i, i + 100] for i in range(3, 150)), *([p[-1], 77] for p in prompts)]


def _expected(
    oracle: Oracle, prompt: list[int], output: list[int], params: SamplingParams, index: int
) -> list[int]:
    """Returns the expected id of each position of an output, given the ids before it."""
    ids = [*prompt, *output]
    places = range(len(prompt), len(ids))
    logits = zip(places, oracle.logits_after(prompt, output), strict=True)
    rows = [edited(params, ids[:place], len(prompt), row) for place, row in logits]
    keys = np.full(len(output), noise_keys(params.seed, index), np.uint64)
    noise = torch.from_numpy(uniform_noise(keys, np.array(places, np.int32)))
    fields = (torch.full((len(output),), value) for value in (TEMPERATURE, 0, 0.95, 0.0))
    temperature, top_k, top_p, min_p = fields
    chosen = torch.empty(len(output), dtype=torch.int64)
    sample_tokens(chosen, torch.stack(rows).float(), temperature, top_k.int(), top_p, min_p, noise)
    return chosen.tolist()


@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
def test_each_of_n_samples_by_its_own_tokens(folder: Any, oracle: Oracle, mode: str | None) -> None:
    """With enough blocks, or preempted in one of the modes."""
    prompts = random_prompts([5, 16, 33, 50], seed=8)
    words = _bad_words(prompts)
    fields = {"n": 3, "temperature": TEMPERATURE, "top_p": 0.95, "logit_bias": BIAS}
    fields |= {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.5}
    fields |= {"bad_words_token_ids": words, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    params = [SamplingParams(seed=seed, **fields) for seed in range(len(prompts))]
    args: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 24}
    if mode is not None:
        args |= {"num_device_blocks_override": 12, "max_model_len": 80, "preemption_mode": mode}
    with log_steps() as log, make_engine(folder, **args) as engine:
        outputs = run(engine, list(zip(prompts, params, strict=True)))
    assert (log.num_swapped > 0) is (mode == "swap")
    assert (log.num_preemptions > 0) is (mode is not None)
    for own, prompt, output in zip(params, prompts, outputs, strict=True):
        answers = [list(completion.token_ids) for completion in output.outputs]
        assert len({tuple(ids) for ids in answers}) == 3
        for index, ids in enumerate(answers):
            assert ids == _expected(oracle, prompt, ids, own, index)


@pytest.mark.parametrize("kind", ["repetition", "bias and min_tokens", "bad words"])
@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_as_transformers(
    engine: LLMEngine, oracle: Oracle, kind: str, num_beams: int
) -> None:
    prompts = random_prompts([4, 20, 40], seed=8)
    common = {**BEAMS, "max_tokens": 12, "n": num_beams}
    plain = run(engine, [(prompt, SamplingParams(**common)) for prompt in prompts])
    said = [list(output.outputs[0].token_ids) for output in plain]
    words = [piece for ids in said for piece in (ids[1:2], ids[3:5], ids[6:9])]
    sequence_bias = {(i,): value for i, value in BIAS.items()}
    values, in_transformers = {
        "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        "bias and min_tokens": (
            {"logit_bias": BIAS, "min_tokens": 8},
            {"sequence_bias": sequence_bias, "min_new_tokens": 8},
        ),
        "bad words": ({"bad_words_token_ids": words}, {"bad_words_ids": words}),
    }[kind]
    params = SamplingParams(**common, **values)
    outputs = run(engine, [(prompt, params) for prompt in prompts])
    changed = 0
    for prompt, output, without in zip(prompts, outputs, plain, strict=True):
        beams = {"num_beams": num_beams, "num_return_sequences": num_beams, "do_sample": False}
        beams |= {"max_new_tokens": 12, "early_stopping": False, "pad_token_id": 0}
        expected = oracle.model.generate(torch.tensor([prompt]), **beams, **in_transformers)
        answers = [list(completion.token_ids) for completion in output.outputs]
        assert answers == [_without_padding(row[len(prompt) :].tolist()) for row in expected]
        changed += answers != [list(completion.token_ids) for completion in without.outputs]
    assert changed >= 2


def test_ranks_of_beams_are_by_raw_logits(engine: LLMEngine, oracle: Oracle) -> None:
    """With bans and biases, beams contain tokens of any rank."""
    (prompt,) = random_prompts([20], seed=8)
    likely = oracle.next_logprobs(prompt).topk(5).indices.tolist()
    bias = dict.fromkeys(range(3, VOCAB_SIZE, 5), 4.0)
    edits = {"logit_bias": bias, "bad_words_token_ids": [[token_id] for token_id in likely]}
    params = SamplingParams(n=3, max_tokens=8, ignore_eos=True, logprobs=2, **BEAMS, **edits)
    (output,) = run(engine, [(prompt, params)])
    ranks = []
    for beam in output.outputs:
        raw = oracle.logits_after(prompt, beam.token_ids).log_softmax(dim=-1)
        for row, token_id, entry in zip(raw, beam.token_ids, beam.logprobs, strict=True):
            own, logprob = float(row[token_id]), entry[token_id]
            assert logprob.logprob == pytest.approx(own, abs=1e-4)
            assert 1 + int((row > own + 1e-4).sum()) <= logprob.rank
            assert logprob.rank <= 1 + int((row > own - 1e-4).sum())
            ranks.append(logprob.rank)
    assert max(ranks) > 10


def _search(
    oracle: Oracle, prompt: list[int], width: int, num_tokens: int, allowed: list[int]
) -> list[list[int]]:
    """Runs beam search over a few tokens; after the first of them every token is banned."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(num_tokens):
        grown = []
        for score, ids in beams:
            if allowed[0] in ids:
                continue
            row = oracle.next_logprobs([*prompt, *ids])
            grown += [(score + float(row[token]), [*ids, token]) for token in allowed]
        beams = sorted(grown, reverse=True)[:width]
    return [ids for _, ids in beams]


def test_a_beam_that_cannot_go_on_is_left_out(engine: LLMEngine, oracle: Oracle) -> None:
    (prompt,) = random_prompts([20], seed=8)
    likely = oracle.next_logprobs(prompt).topk(5).indices.tolist()
    dead_end = likely[0]
    common = {**BEAMS, "max_tokens": 5, "ignore_eos": True}
    banned = [[dead_end, other] for other in likely]
    wide = SamplingParams(n=3, allowed_token_ids=likely, bad_words_token_ids=banned, **common)
    dead = {"allowed_token_ids": [dead_end], "bad_words_token_ids": [[dead_end, dead_end]]}
    lonely = SamplingParams(n=2, **common, **dead)
    output, failed = run(engine, [(prompt, wide), (prompt, lonely)])
    assert output.error is None
    answers = [list(completion.token_ids) for completion in output.outputs]
    assert answers == _search(oracle, prompt, 3, 5, likely)
    assert "no token can be sampled" in str(failed.error)
    assert failed.outputs[0].finish_reason == "error"


def _without_padding(ids: list[int]) -> list[int]:
    return ids[: ids.index(END_TOKEN_ID) + 1] if END_TOKEN_ID in ids else ids


def test_prompt_logprobs_of_a_group(engine: LLMEngine) -> None:
    """Reported once per request, with the same values as for one sequence."""
    prompt = random_prompts([30], seed=8)[0]
    single, many = (
        run(engine, [(prompt, SamplingParams(n=n, prompt_logprobs=2, seed=1, max_tokens=3))])[0]
        for n in (1, 3)
    )
    assert single.prompt_logprobs is not None
    assert single.prompt_logprobs == many.prompt_logprobs
    # Again, with the prompt in the prefix cache.
    again = run(engine, [(prompt, SamplingParams(prompt_logprobs=2, max_tokens=3))])[0]
    assert again.prompt_logprobs == single.prompt_logprobs
