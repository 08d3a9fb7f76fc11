"""Prompts that are refused: by type, with value, limit and remedy, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engines import greedy, open_llm
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import LLM, SamplingParams
from tpengine.errors import (
    InvalidPromptError,
    InvalidSamplingParamsError,
    RequestError,
)


@pytest.fixture(scope="module")
def llm(models: ModelShop) -> Iterator[LLM]:
    with open_llm(models.folder(PLAIN), max_model_len=100) as llm:
        yield llm


BAD_PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([], ("empty", "at least one")),
    "too long": (list(range(5, 106)), ("101", "100", "max_model_len", "shorten")),
    "id too large": ([5, 6, 512], ("prompt_token_ids[2]", "512", "[0, 511]")),
    "negative id": ([-1], ("prompt_token_ids[0]", "-1", "[0, 511]")),
    "no integer": ([5, 1.5], ("prompt_token_ids[1]", "1.5", "integers")),
    "a flag": ([True], ("prompt_token_ids[0]", "True")),
    "text among ids": ([5, "6"], ("prompt_token_ids[1]", "'6'")),
}


@pytest.mark.parametrize("name", list(BAD_PROMPTS))
def test_bad_prompts(llm: LLM, models: ModelShop, name: str) -> None:
    bad, words = BAD_PROMPTS[name]
    engine = llm.llm_engine
    with pytest.raises(InvalidPromptError) as raised:
        engine.add_request("bad", None, greedy(4), prompt_token_ids=bad)
    for word in words:
        assert word in str(raised.value)
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)
    assert engine.get_num_unfinished_requests() == 0
    oracle = models.oracle(models.folder(PLAIN))
    good = oracle.prompts((7, 33), seed=1)
    outputs = llm.generate(None, greedy(8), [good[0], bad, good[1]], use_tqdm=False)
    assert outputs[1].error == str(raised.value)
    assert outputs[1].finished
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == ()
    expected = [answer.token_ids[:8] for answer in oracle.answers(good)]
    assert [outputs[0].outputs[0].token_ids, outputs[2].outputs[0].token_ids] == expected


@pytest.mark.parametrize(
    ("prompt", "token_ids", "words"),
    [
        (None, None, ("neither",)),
        ({"prompt_token_id": [1]}, None, ("prompt_token_ids", "prompt_token_id'")),
        (7, None, ("int", "prompt_token_ids")),
        (["a", "b"], None, ("list",)),
        (None, 7, ("int", "list of integers")),
        (None, "abc", ("str", "list of integers")),
        ("text", None, ("no tokenizer",)),
    ],
)
def test_prompts_of_the_wrong_kind(
    llm: LLM, prompt: Any, token_ids: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidPromptError) as raised:
        llm.llm_engine.add_request("bad", prompt, greedy(4), prompt_token_ids=token_ids)
    for word in words:
        assert word in str(raised.value)


def test_text_that_is_no_unicode(models: ModelShop) -> None:
    with open_llm(models.folder(PLAIN, tokenizer=True)) as llm:
        outputs = llm.generate(["a\ud800b", "ab", ""], greedy(2), use_tqdm=False)
    assert "no valid Unicode at character 1 ('\\ud800'" in outputs[0].error
    assert outputs[1].error is None
    assert "empty" in outputs[2].error


def test_arguments_of_the_wrong_kind(llm: LLM) -> None:
    for ids in (5, "abc"):
        with pytest.raises(InvalidPromptError, match="prompt_token_ids must be a list"):
            llm.generate(prompt_token_ids=ids)
    with pytest.raises(InvalidPromptError, match="messages must be a list"):
        llm.chat({"role": "user", "content": "hello"})
    with pytest.raises(InvalidSamplingParamsError, match="stop_token_ids must be a sequence"):
        SamplingParams(stop_token_ids=5)
    with pytest.raises(InvalidSamplingParamsError, match=r"must be an integer, got np\.int64"):
        SamplingParams(stop_token_ids=np.array([4, 5]))


@pytest.mark.parametrize("number", [1 << 31, 1 << 40, 1 << 70])
def test_numbers_beyond_any_vocabulary(llm: LLM, number: int) -> None:
    """Nothing is meant by them but all."""
    prompt = {"prompt_token_ids": [5, 6, 7]}
    usual = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    huge = replace(usual, top_k=number)
    one, other = llm.generate([prompt, prompt], [usual, huge], use_tqdm=False)
    assert other.outputs[0].token_ids == one.outputs[0].token_ids
    (longest,) = llm.generate(prompt, replace(usual, max_tokens=number), use_tqdm=False)
    assert longest.outputs[0].finish_reason == "length"
