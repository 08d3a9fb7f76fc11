"""Penalties, biases, bans and processors through the whole engine, against transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import logits_processors
from support.byte_llama import VOCAB_SIZE, make_engine, run
from support.edited_logits import edited
from support.engines import greedy, ids
from support.oracle import Edit, Oracle
from support.step_log import log_steps

from tpengine import LLMEngine, RequestOutput, SamplingParams

LENGTHS = [3, 40, 70, 7, 30, 55]
BIAS = {7: 2.5, 90: -4.0, 201: 1.5}
ALLOWED = list(range(40, 120))


def _banned_words(oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    """Returns words of one, two and three tokens that greedy decoding would produce."""
    words = []
    for answer in oracle.answers(prompts):
        said = list(answer.token_ids)
        words += [said[2:3], said[5:7], said[9:12], [answer.prompt[-1], said[0]]]
    return words


def _edit_of(params: SamplingParams, num_prompt_tokens: int) -> Edit:
    def edit(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        row = edited(params, ids, num_prompt_tokens, logits)
        if params.logits_processors:
            row = logits_processors.forbid_last(ids[num_prompt_tokens:], row)
        return row

    return edit


@pytest.fixture(scope="module")
def requests(oracle: Oracle) -> list[tuple[list[int], SamplingParams]]:
    """Returns (prompt, parameters) of every case and length."""
    prompts = oracle.random_prompts(LENGTHS, seed=5)
    words = _banned_words(oracle, prompts)
    cases: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.6},
        {"logit_bias": BIAS},
        {"bad_words_token_ids": words},
        {"allowed_token_ids": ALLOWED},
        {"repetition_penalty": 1.6, "logit_bias": BIAS, "bad_words_token_ids": words},
        {"frequency_penalty": 0.7, "presence_penalty": 1.1},
        {"frequency_penalty": -1.5},
        {"logits_processors": "support.logits_processors:forbid_last"},
    ]
    params = [greedy(oracle.num_tokens, **values) for values in cases]
    return [(prompt, own) for own, prompt in itertools.product(params, prompts)]


def _processor(name: str, by_name: bool) -> Any:
    path = f"support.logits_processors:{name}"
    return path if by_name else getattr(logits_processors, name)


def serve(folder: Any, oracle: Oracle, requests: Any, **args: Any) -> list[RequestOutput]:
    """Answers to all requests at once, which must be the likeliest after the edits, and most of
    which the edits must have changed."""
    with make_engine(folder, max_num_seqs=16, **args) as engine:
        outputs = run(engine, requests)
    changed = 0
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == oracle.num_tokens
        oracle.assert_likeliest([prompt], [token_ids], _edit_of(params, len(prompt)))
        changed += token_ids != oracle.answers([prompt])[0].token_ids
    assert changed >= len(requests) // 2
    return outputs


@pytest.mark.parametrize("chunked", [True, False])
def test_in_a_crowd(folder: Any, oracle: Oracle, requests: Any, chunked: bool) -> None:
    serve(folder, oracle, requests, max_num_batched_tokens=256, enable_chunked_prefill=chunked)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_preemption(folder: Any, oracle: Oracle, requests: Any, mode: str) -> None:
    """After recompute or swap the counts of a sequence cover all its tokens."""
    tight = {"num_device_blocks_override": 10, "max_model_len": 112, "preemption_mode": mode}
    with log_steps() as log:
        outputs = serve(folder, oracle, requests, **tight)
    log.assert_only(mode)
    pairs = zip(outputs, requests, strict=True)
    preempted = [params for output, (_, params) in pairs if output.metrics.num_preemptions]
    penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in preempted]
    assert sum(values != (0.0, 0.0, 1.0) for values in penalties) >= 3
    assert len(preempted) >= 8


def test_bad_words_as_text_do_not_appear(engine: LLMEngine) -> None:
    prompt = engine.tokenizer.encode("ab ab ab", False)
    bias = dict(zip(engine.tokenizer.encode("xyab ab", False), (14.0, 14.0, 9.0, 9.0), strict=True))
    common = {"temperature": 1.0, "seed": 0, "max_tokens": 60, "logit_bias": bias}
    common |= {"ignore_eos": True}
    cases = [SamplingParams(**common), SamplingParams(**common, bad_words=["ab", "xy"])]
    free, ruled = run(engine, [(prompt, params) for params in cases])
    assert "ab" in free.outputs[0].text
    assert "xy" in free.outputs[0].text
    assert "x" in ruled.outputs[0].text
    assert "xy" not in ruled.outputs[0].text
    words = [engine.tokenizer.encode(word, False) for word in ("ab", " ab")]
    assert all(len(word) == 1 for word in words)
    assert not {word[0] for word in words} & set(ruled.outputs[0].token_ids)


@pytest.mark.parametrize("by_name", [True, False], ids=["names", "functions"])
def test_processor_gets_prompt_and_output(engine: LLMEngine, by_name: bool) -> None:
    logits_processors.seen.clear()
    prompt = [10, 11, 12]
    processors = [_processor(name, by_name) for name in ("forbid_last", "forbid_prompt")]
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (output,) = run(engine, [(prompt, SamplingParams(logits_processors=processors, **fields))])
    ids = list(output.outputs[0].token_ids)
    assert logits_processors.seen == [(prompt, ids[:i]) for i in range(4)]
    assert not set(ids) & set(prompt)


FAILURES = {
    "fail_at_third": "KeyError: 'the third token'",
    "exit_process": "SystemExit: 3",
    "forget_to_return": "it must return the logits, got NoneType",
    "cut_off": r"it must return \[288\] logits, got \[287\]",
    "make_nan": "its logits are NaN",
    "make_sparse": "make_sparse. failed: ",
    "lose_data": "lose_data. failed: ",
    "quantize": "quantize. failed: ",
    "forbid_all": "no token can be sampled: structured_outputs, allowed_token_ids, bad_words",
}


@pytest.mark.parametrize("by_name", [True, False], ids=["name", "function"])
@pytest.mark.parametrize("name", sorted(FAILURES))
def test_a_processor_that_fails_ends_its_request_alone(
    engine: LLMEngine, oracle: Oracle, name: str, by_name: bool
) -> None:
    good = oracle.random_prompts([5, 30], seed=1)
    plain = greedy(oracle.num_tokens)
    bad = SamplingParams(n=2, seed=0, max_tokens=10, logits_processors=[_processor(name, by_name)])
    first, failed, last = run(engine, [(good[0], plain), ([4, 5, 6], bad), (good[1], plain)])
    oracle.assert_greedy(good, ids([first, last]))
    assert failed.finished
    assert {completion.finish_reason for completion in failed.outputs} == {"error"}
    assert len(failed.outputs[0].token_ids) == (2 if name == "fail_at_third" else 0)
    with pytest.raises(AssertionError, match=FAILURES[name]):
        raise AssertionError(failed.error)


def test_a_dict_of_bias_for_the_whole_vocabulary(engine: LLMEngine) -> None:
    bias = {token_id: float(token_id == 77) * 1e5 for token_id in range(VOCAB_SIZE)}
    (output,) = run(engine, [([5], SamplingParams(logit_bias=bias, max_tokens=3))])
    assert output.outputs[0].token_ids == (77, 77, 77)
