"""Penalties, biases, bans and processors through the whole engine, against transformers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import logits_processors
from support.byte_llama import VOCAB_SIZE, Edit, clear_prompts, greedy, make_engine, run
from support.edited_logits import edited
from support.step_log import log_steps

from tpengine import LLMEngine, RequestOutput, SamplingParams

LENGTHS = [3, 40, 70]
NUM_TOKENS = 20
BIAS = {7: 2.5, 90: -4.0, 201: 1.5}
ALLOWED = list(range(40, 120))


def _banned_words(oracle: Any) -> list[list[int]]:
    """Returns words of one, two and three tokens that greedy decoding would produce."""
    words = []
    for prompt, answer in clear_prompts(oracle, LENGTHS, NUM_TOKENS):
        words += [answer[2:3], answer[5:7], answer[9:12], [prompt[-1], answer[0]]]
    return words


def _edit_of(params: SamplingParams, num_prompt_tokens: int) -> Edit:
    def edit(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        row = edited(params, ids, num_prompt_tokens, logits)
        if params.logits_processors:
            row = logits_processors.forbid_last(ids[num_prompt_tokens:], row)
        return row

    return edit


@pytest.fixture(scope="module")
def requests(oracle: Any) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Returns (prompt, parameters, expected ids) of every case and length."""
    words = _banned_words(oracle)
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
    asked = []
    for values, length in itertools.product(cases, LENGTHS):
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **values)
        edit = _edit_of(params, length)
        ((prompt, answer),) = clear_prompts(oracle, [length], NUM_TOKENS, edit, length)
        asked.append((prompt, params, answer))
    return asked


def _processor(name: str, by_name: bool) -> Any:
    path = f"support.logits_processors:{name}"
    return path if by_name else getattr(logits_processors, name)


def test_edits_change_the_tokens(oracle: Any, requests: Any) -> None:
    """Otherwise the comparison below would pass without edits."""
    changed = [greedy(oracle, prompt, NUM_TOKENS)[0] != answer for prompt, _, answer in requests]
    assert sum(changed) >= len(requests) // 2


def serve(folder: Any, requests: Any, **args: Any) -> list[RequestOutput]:
    """Answers to all requests at once, which must be the expected ones."""
    with make_engine(folder, max_num_seqs=16, **args) as engine:
        outputs = run(engine, [(prompt, params) for prompt, params, _ in requests])
    for output, (_, params, answer) in zip(outputs, requests, strict=True):
        assert list(output.outputs[0].token_ids) == answer, params
    return outputs


@pytest.mark.parametrize("chunked", [True, False])
def test_in_a_crowd(folder: Any, requests: Any, chunked: bool) -> None:
    serve(folder, requests, max_num_batched_tokens=256, enable_chunked_prefill=chunked)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_preemption(folder: Any, requests: Any, mode: str) -> None:
    """After recompute or swap the counts of a sequence cover all its tokens."""
    tight = {"num_device_blocks_override": 10, "max_model_len": 112, "preemption_mode": mode}
    with log_steps() as log:
        outputs = serve(folder, requests, **tight)
    log.assert_only(mode)
    pairs = zip(outputs, requests, strict=True)
    preempted = [params for output, (_, params, _) in pairs if output.metrics.num_preemptions]
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
    engine: LLMEngine, oracle: Any, name: str, by_name: bool
) -> None:
    good = clear_prompts(oracle, [5, 30], 10, seed=1)
    plain = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    bad = SamplingParams(n=2, seed=0, max_tokens=10, logits_processors=[_processor(name, by_name)])
    first, failed, last = run(engine, [(good[0][0], plain), ([4, 5, 6], bad), (good[1][0], plain)])
    assert [list(o.outputs[0].token_ids) for o in (first, last)] == [good[0][1], good[1][1]]
    assert failed.finished
    assert {completion.finish_reason for completion in failed.outputs} == {"error"}
    assert len(failed.outputs[0].token_ids) == (2 if name == "fail_at_third" else 0)
    with pytest.raises(AssertionError, match=FAILURES[name]):
        raise AssertionError(failed.error)


def test_a_dict_of_bias_for_the_whole_vocabulary(engine: LLMEngine) -> None:
    bias = {token_id: float(token_id == 77) * 1e5 for token_id in range(VOCAB_SIZE)}
    (output,) = run(engine, [([5], SamplingParams(logit_bias=bias, max_tokens=3))])
    assert output.outputs[0].token_ids == (77, 77, 77)
