"""A request has the same tokens by every way through the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.engines import greedy, ids, outputs_of
from support.event_loop import run_async
from support.oracle import Oracle

from async_engine.tools import read_ids
from tpengine import AsyncLLMEngine, RequestOutputKind
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import InvalidPromptError

LENGTHS = [1, 5, 16, 17, 40, 90, 33, 64]


@pytest.fixture(scope="module")
def prompts(oracle: Oracle) -> list[list[int]]:
    prompts = oracle.prompts(LENGTHS, seed=5)
    oracle.assert_discerning(prompts)
    return prompts


def test_offline_unary_and_streamed_tokens_are_equal(
    engine: AsyncLLMEngine, folder: Path, oracle: Oracle, prompts: list[list[int]]
) -> None:
    offline = ids(outputs_of(folder, prompts, greedy(24)))

    async def all_of(kind: RequestOutputKind) -> list[tuple[int, ...]]:
        params = greedy(24, output_kind=kind)
        return await asyncio.gather(*(read_ids(engine, prompt, params) for prompt in prompts))

    async def every_kind() -> list[list[tuple[int, ...]]]:
        return [await all_of(kind) for kind in RequestOutputKind]

    answers = [answer.token_ids[:24] for answer in oracle.answers(prompts)]
    assert offline == answers
    assert run_async(every_kind()) == [answers] * 3


async def test_messages_and_a_prompt_are_refused(engine: AsyncLLMEngine) -> None:
    request = GenerateRequest(prompt="a", messages=[{"role": "user", "content": "b"}])
    with pytest.raises(InvalidPromptError, match="give one of them"):
        await anext(engine.serve(request))


async def test_text_and_ids(engine: AsyncLLMEngine) -> None:
    token_ids = await engine.tokenize("hello there")
    assert token_ids == engine.llm_engine.tokenizer.encode("hello there")
    assert await engine.detokenize(token_ids) == "hello there"
    for wrong in (-1, 512, True, 1.5):
        with pytest.raises(InvalidPromptError, match="no id of the vocabulary"):
            await engine.detokenize([5, wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidPromptError):
        await engine.tokenize("\ud800")
