"""A request has the same tokens by every way through the engine."""

from __future__ import annotations

import pytest

from tpengine import AsyncLLMEngine
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import InvalidPromptError


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
