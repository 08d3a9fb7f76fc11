"""Prompts that are refused or too long: with value, limit and remedy, and the engine goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engines import greedy, open_llm, run
from support.messages import refused, said
from support.models import ModelShop
from support.zoo import PLAIN
from transformers import BatchEncoding

from tpengine import LLM, SamplingParams
from tpengine.errors import InvalidPromptError, InvalidSamplingParamsError, RequestError


@pytest.fixture(scope="module")
def llm(models: ModelShop) -> Iterator[LLM]:
    with open_llm(models.folder(PLAIN), max_model_len=100) as llm:
        yield llm


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty | at least one"),
    ([5, 6, 512], "prompt_token_ids[2] | 512 | [0, 511]"),
    ([-1], "prompt_token_ids[0] | -1 | [0, 511]"),
    ([5, 1.5], "prompt_token_ids[1] | 1.5 | integers"),
    ([True], "prompt_token_ids[0] | True"),
    (b"text", "list of integers | bytes"),
    (BatchEncoding({"input_ids": [5]}), "BatchEncoding | ['input_ids']"),
    ([5, "6"], "prompt_token_ids[1] | '6'"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_PROMPTS)
def test_bad_prompts(llm: LLM, models: ModelShop, bad: Any, words: str) -> None:
    engine = llm.llm_engine
    with refused(InvalidPromptError, words) as raised:
        engine.add_request("bad", None, greedy(4), prompt_token_ids=bad)
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)
    assert engine.get_num_unfinished_requests() == 0
    oracle = models.oracle(models.folder(PLAIN))
    good = oracle.prompts((7, 33), seed=1)
    prompts = [good[0], bad, good[1]]
    with pytest.raises(InvalidPromptError) as again:
        llm.generate(None, greedy(8), prompts, use_tqdm=False)
    assert str(again.value) == f"prompts[1]: {raised.value}"
    assert engine.get_num_unfinished_requests() == 0
    outputs = llm.generate(None, greedy(8), prompts, use_tqdm=False, on_error="return")
    assert outputs[1].error == str(raised.value)
    assert outputs[1].finished
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == ()
    expected = [answer.token_ids[:8] for answer in oracle.answers(good)]
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == expected


@pytest.mark.parametrize(
    "params",
    [greedy(4), SamplingParams(n=2), SamplingParams(n=2, use_beam_search=True, temperature=0.0)],
)
def test_a_prompt_that_is_too_long_ends_for_its_length(
    llm: LLM, caplog: pytest.LogCaptureFixture, params: SamplingParams
) -> None:
    long, engine = list(range(5, 106)), llm.llm_engine
    with said(caplog) as messages:
        good, generated = llm.generate(None, params, [[5, 6], long], use_tqdm=False)
        engine.add_request("long", None, params, prompt_token_ids=long)
        (stepped,) = engine.step()
    assert good.error is None
    for output in (generated, stepped):
        assert output.finished
        assert output.prompt_token_ids == long
        assert re.search("101 tokens.* max_model_len = 100.*shorten", output.error)
        ends = [(end.text, list(end.token_ids), end.finish_reason) for end in output.outputs]
        assert ends == [("", [], "length")] * params.n
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert generated.error in messages[0]
    assert "'long'" in messages[1]
    assert not engine.has_unfinished_requests()


def test_requests_of_another_caller_stay(llm: LLM) -> None:
    """It has taken the id that `generate` would take next."""
    engine, taken = llm.llm_engine, str(next(llm.request_counter) + 1)
    engine.add_request(taken, None, greedy(3), prompt_token_ids=[5, 6])
    with pytest.raises(InvalidPromptError, match=r"^prompts\[0\]: the prompt is empty"):
        llm.generate(None, greedy(1), [[], [7]], use_tqdm=False)
    (own,) = llm.generate(None, greedy(1), [[7]], use_tqdm=False)
    assert own.error is None
    (other,) = [output for output in run(engine) if output.finished]
    assert (other.request_id, len(other.outputs[0].token_ids)) == (taken, 3)


@pytest.mark.parametrize("name", ["prompt_adapter_request", "trace_headers"])
def test_what_is_not_served_is_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(InvalidPromptError, match=f"^{name} = 'x' is not served; "):
        llm.llm_engine.add_request("bad", None, prompt_token_ids=[5], **{name: "x"})
    assert not llm.llm_engine.has_unfinished_requests()
    if name != "trace_headers":
        with pytest.raises(InvalidPromptError, match=f"^{name} = 'x' is not served; "):
            llm.generate("a", **{name: "x"})


@pytest.mark.parametrize(
    ("prompt", "token_ids", "words"),
    [
        (None, None, "none of them"),
        ({"prompt_token_id": [1]}, None, "prompt_token_ids | prompt_token_id'"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": 1}}, None, "text alone"),
        (
            {"prompt_token_ids": [5], "multi_modal_data": {"audio": 1}},
            None,
            "must be {'image': ...}",
        ),
        (7, None, "int | prompt_token_ids"),
        (["a", "b"], None, "list"),
        (None, 7, "int | list of integers"),
        (None, "abc", "str | list of integers"),
        ("text", None, "no tokenizer"),
    ],
)
def test_prompts_of_the_wrong_kind(llm: LLM, prompt: Any, token_ids: Any, words: str) -> None:
    with refused(InvalidPromptError, words):
        llm.llm_engine.add_request("bad", prompt, greedy(4), prompt_token_ids=token_ids)


def test_text_that_is_no_unicode(models: ModelShop) -> None:
    with open_llm(models.folder(PLAIN, tokenizer=True)) as llm:
        prompts = ["a\ud800b", "ab", "", {"prompt": "ab", "multi_modal_data": None}]
        outputs = llm.generate(prompts, greedy(2), use_tqdm=False, on_error="return")
        with pytest.raises(InvalidPromptError, match="messages must be a list"):
            llm.chat({"role": "user", "content": "hello"})
    assert "no valid Unicode at character 1 ('\\ud800'" in outputs[0].error
    assert "empty" in outputs[2].error
    assert [outputs[i].error for i in (1, 3)] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_token_ids": 5}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list"),
        ({"guided_options_request": {"guided_jsn": {}}}, "guided_jsn"),
        ({"on_error": "skip"}, "on_error must be 'raise' or 'return', got 'skip'"),
        ({"sampling_params": {"max_tokens": 3}}, "params must be SamplingParams"),
    ],
)
def test_arguments_of_the_wrong_kind(llm: LLM, arguments: dict[str, Any], words: str) -> None:
    prompts = None if "prompt_token_ids" in arguments else [[5]]
    with refused(RequestError, words):
        llm.generate(prompts, **arguments)


def test_values_of_the_wrong_kind(llm: LLM) -> None:
    with refused(InvalidSamplingParamsError, "must be SamplingParams, got <object"):
        llm.llm_engine.add_request("bad", None, object(), prompt_token_ids=[5])
    with refused(InvalidSamplingParamsError, "stop_token_ids must be a list"):
        SamplingParams(stop_token_ids=5)
    with refused(InvalidSamplingParamsError, "must be an integer, got np.float64"):
        SamplingParams(stop_token_ids=np.array([4.0, 5.0]))


@pytest.mark.parametrize("number", [1 << 31, 1 << 40, (1 << 63) - 1])
def test_numbers_beyond_any_vocabulary(llm: LLM, number: int) -> None:
    """Nothing is meant by them but all."""
    prompt = {"prompt_token_ids": [5, 6, 7]}
    usual = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    huge = replace(usual, top_k=number)
    plain, other = llm.generate([prompt, prompt], [usual, huge], use_tqdm=False)
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    (longest,) = llm.generate(prompt, replace(usual, max_tokens=number), use_tqdm=False)
    assert longest.outputs[0].finish_reason == "length"
