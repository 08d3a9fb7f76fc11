"""A request has the same tokens by every way through the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.engines import greedy, ids, open_llm
from support.oracle import Oracle

from async_engine.tools import DELTA, FINAL, last_output, read_ids, run_async, stream
from tpengine import AsyncLLMEngine, RequestOutputKind, SamplingParams
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
    with open_llm(folder) as llm:
        offline = ids(llm.generate(None, greedy(24), prompts, use_tqdm=False))

    async def all_of(kind: RequestOutputKind) -> list[tuple[int, ...]]:
        params = greedy(24, output_kind=kind)
        return await asyncio.gather(*(read_ids(engine, prompt, params) for prompt in prompts))

    async def every_kind() -> list[list[tuple[int, ...]]]:
        return [await all_of(kind) for kind in RequestOutputKind]

    answers = [answer.token_ids[:24] for answer in oracle.answers(prompts)]
    assert offline == answers
    assert run_async(every_kind()) == [answers] * 3


def test_text_deltas_add_up(engine: AsyncLLMEngine) -> None:
    async def both() -> tuple[str, str]:
        whole = await last_output(engine, "the cat sat on the mat", greedy(40, output_kind=FINAL))
        parts = [
            output.outputs[0].text
            async for output in engine.generate("the cat sat on the mat", stream(40))
        ]
        return whole.outputs[0].text, "".join(parts)

    whole, parts = run_async(both())
    assert whole == parts
    assert len(whole) > 10


def test_the_chat_template_makes_the_prompt(engine: AsyncLLMEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]

    async def both() -> tuple[tuple[int, ...], tuple[int, ...]]:
        token_ids = await engine.chat_token_ids(messages)
        request = GenerateRequest(messages=messages, params=greedy(6))
        outputs = [output async for output in engine.serve(request)]
        assert outputs[-1].prompt_token_ids == token_ids
        return outputs[-1].outputs[0].token_ids, await read_ids(engine, token_ids, greedy(6))

    chat, plain = run_async(both())
    assert chat == plain


def test_messages_and_a_prompt_are_refused(engine: AsyncLLMEngine) -> None:
    async def ask() -> None:
        request = GenerateRequest(prompt="a", messages=[{"role": "user", "content": "b"}])
        with pytest.raises(InvalidPromptError, match="give one of them"):
            await anext(engine.serve(request))

    run_async(ask())


def test_sequences_of_one_request_stream(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)

    async def both() -> tuple[list[list[int]], list[list[int]]]:
        whole = await last_output(engine, "abc", params)
        deltas: dict[int, list[int]] = {}
        asked = SamplingParams(**{**params.__dict__, "output_kind": DELTA})
        async for output in engine.generate("abc", asked):
            for one in output.outputs:
                deltas.setdefault(one.index, []).extend(one.token_ids)
        return [list(one.token_ids) for one in whole.outputs], [deltas[i] for i in sorted(deltas)]

    whole, streamed = run_async(both())
    assert whole == streamed
    assert len({tuple(one) for one in whole}) == 3


def test_text_and_ids(engine: AsyncLLMEngine) -> None:
    async def ask() -> None:
        token_ids = await engine.tokenize("hello there")
        assert token_ids == engine.llm_engine.tokenizer.encode("hello there")
        assert await engine.detokenize(token_ids) == "hello there"
        for wrong in (-1, 512, True, 1.5):
            with pytest.raises(InvalidPromptError, match="no id of the vocabulary"):
                await engine.detokenize([5, wrong])  # type: ignore[list-item]
        with pytest.raises(InvalidPromptError):
            await engine.tokenize("\ud800")

    run_async(ask())
