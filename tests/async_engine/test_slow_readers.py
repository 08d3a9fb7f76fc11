"""A slow reader, or one that does not read at all, does not slow other requests down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deltas import delta
from support.engines import greedy
from support.event_loop import run_async

from async_engine.tools import MakeGate, read_ids, stream, until
from tpengine import AsyncLLMEngine, Logprob, RequestOutput
from tpengine.async_engine.mailbox import Mailbox

NUM_TOKENS = 200


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 9))), st.booleans()),
        min_size=1,
        max_size=100,
    )
)
def test_merged_deltas_are_the_deltas(steps: list[tuple[dict[int, list[int]], bool]]) -> None:
    """All that the reader takes, at any time, adds up to what was sent."""
    sent: dict[int, list[int]] = {}
    read: dict[int, tuple[list[int], str, list[Any]]] = {}

    def take(output: RequestOutput | None) -> None:
        for part in output.outputs if output is not None else ():
            ids, text, logprobs = read.get(part.index, ([], "", []))
            read[part.index] = ([*ids, *part.token_ids], text + part.text, logprobs + part.logprobs)

    box = Mailbox(merges=True)
    for tokens, looks in steps:
        for index, ids in tokens.items():
            sent.setdefault(index, []).extend(ids)
        box.put(delta(tokens))
        if looks:
            take(box.take_unread())
    box.put(delta({0: []}, finished=True, num_output_tokens=7))
    last = box.take_unread()
    assert last.finished
    assert last.outputs[0].finish_reason == "length"
    take(last)
    assert box.take_unread() is None
    sent.setdefault(0, [])
    assert {index: ids for index, (ids, _, _) in read.items()} == sent
    for index, (ids, text, logprobs) in read.items():
        assert text == "".join(f"{token} " for token in sent[index])
        assert [next(iter(entry)) for entry in logprobs] == ids
    assert box.num_output_tokens == last.num_output_tokens == 7


def test_nothing_comes_after_the_end() -> None:
    box = Mailbox(merges=True)
    box.put(delta({0: [1]}, finished=True))
    box.put(delta({0: [2]}))
    box.close(ValueError("late"))
    assert run_async(box.take()).outputs[0].token_ids == (1,)
    box = Mailbox(merges=True)
    box.close(ValueError("first"))
    box.close(ValueError("second"))
    box.put(delta({0: [2]}))
    with pytest.raises(ValueError, match="first"):
        run_async(box.take())


async def test_a_stream_without_a_reader(engine: AsyncLLMEngine, gate: MakeGate) -> None:
    """It runs to its end. Other requests take as many steps as without it, and its output waits as
    one."""

    async def others() -> int:
        held, before = gate(engine), engine.stats().num_steps
        wanted = engine.get_num_unfinished_requests() + 4
        ids = asyncio.gather(*(read_ids(engine, [i + 4] * 8, stream(NUM_TOKENS)) for i in range(4)))
        await until(lambda: engine.get_num_unfinished_requests() == wanted)
        held.open()  # from now on all of them run in the same steps
        answers = await ids
        assert [len(answer) for answer in answers] == [NUM_TOKENS] * 4
        return engine.stats().num_steps - before

    expected = await read_ids(engine, [50] * 8, stream(NUM_TOKENS))
    alone = await others()
    silent = engine.generate(None, stream(NUM_TOKENS), "silent", prompt_token_ids=[50] * 8)
    first = await anext(silent)
    beside = await others()
    assert abs(beside - alone) <= 5, "the others take as many steps"
    await until(lambda: engine.get_num_unfinished_requests() == 0)
    rest = [output async for output in silent]
    assert len(rest) == 1, "outputs that were not read are merged into one"
    assert first.outputs[0].token_ids + rest[0].outputs[0].token_ids == expected
    assert rest[0].finished


async def test_a_cumulative_reader_gets_the_newest(engine: AsyncLLMEngine) -> None:
    outputs = engine.generate(None, greedy(60), "it", prompt_token_ids=[50] * 8)
    await anext(outputs)
    await until(lambda: engine.get_num_unfinished_requests() == 0)
    rest = [output async for output in outputs]
    assert [len(output.outputs[0].token_ids) for output in rest] == [60]


async def test_log_probabilities_stream(engine: AsyncLLMEngine) -> None:
    token_ids: list[int] = []
    entries: list[dict[int, Logprob]] = []
    params = stream(30, logprobs=2)
    async for output in engine.generate(None, params, prompt_token_ids=[50] * 8):
        await asyncio.sleep(0.005)  # so that some are merged
        token_ids += output.outputs[0].token_ids
        entries += output.outputs[0].logprobs or []
    assert len(token_ids) == len(entries) == 30
    assert all(token in entry for token, entry in zip(token_ids, entries, strict=True))
