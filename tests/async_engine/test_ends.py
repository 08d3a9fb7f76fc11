"""A request ends in any way: its blocks are freed, and other requests are not disturbed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.engines import greedy

from async_engine.conftest import MakeHeld
from async_engine.tools import (
    TIMEOUT_S,
    MakeGate,
    hold_timers,
    read_ids,
    read_mailbox,
    stream,
    until,
)
from tpengine import AsyncLLMEngine, CompletionOutput, RequestOutput, RequestOutputKind, errors
from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.async_engine.request_table import RequestTable
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import DeadlineExceededError, RequestAbortedError


@pytest.mark.parametrize("way", ["cancel", "abort", "abort of a server", "deadline"])
async def test_blocks_are_back_before_a_step(make_held: MakeHeld, way: str) -> None:
    engine, held = make_held()
    total = engine.llm_engine.num_total_blocks
    timers = hold_timers()
    other = asyncio.create_task(read_ids(engine, [9] * 20, stream(30), request_id="other"))
    deadline = time.monotonic() + 600 if way == "deadline" else None
    read = read_mailbox if way == "abort of a server" else read_ids
    asked = read(engine, [5] * 40, stream(30), request_id="it", deadline=deadline)
    reader = asyncio.create_task(asked)
    await held.reached(1)
    held.let(2)
    await held.reached(3)  # the step is being computed
    assert held.steps[2] == (2, total - 2 - 3)
    if way.startswith("abort"):
        aborting = [asyncio.create_task(engine.abort("it")) for _ in range(2)]
    elif way == "deadline":
        timers.pop()()
    else:
        reader.cancel()
    if way == "abort":  # the last output is not known before the end of the step
        await asyncio.sleep(0)
        assert not reader.done()
    else:
        await asyncio.wait({reader}, timeout=TIMEOUT_S / 2)
        assert reader.done(), "a reader does not wait for the step"
    held.let(1)
    await held.reached(4)
    assert held.steps[3] == (1, total - 2), "the request is not in the next step"
    held.open()
    if way.startswith("abort"):
        first, second = await asyncio.gather(*aborting)
        assert first
        assert second == (way == "abort"), "a request is found until it has ended"
    if way == "abort":
        assert len(await reader) == 3, "the output of all steps"
    if way == "abort of a server":
        assert isinstance(reader.exception(), RequestAbortedError)
    if way == "deadline":
        assert isinstance(reader.exception(), DeadlineExceededError)
    assert len(await other) == 30


async def test_a_generator_that_is_dropped_aborts(make_held: MakeHeld) -> None:
    engine, held = make_held()
    held.let(2)
    async for _ in engine.generate(None, stream(30), "it", prompt_token_ids=[5] * 40):
        break
    await until(lambda: engine.get_num_unfinished_requests() == 0)
    held.open()
    inner = engine.llm_engine
    await until(lambda: inner.num_free_blocks == inner.num_total_blocks)
    assert not inner.has_unfinished_requests()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_an_aborted_stream_ends_with_its_output(
    engine: AsyncLLMEngine, gate: MakeGate, kind: RequestOutputKind
) -> None:
    held = gate(engine)
    assert not await engine.abort("unknown")
    params = greedy(200, output_kind=kind)
    outputs = await engine.add_request("it", {"prompt_token_ids": [5] * 10}, params)
    assert (outputs.request_id, outputs.finished) == ("it", False)
    held.let(3)
    await held.reached(4)
    aborting = asyncio.create_task(engine.abort("it"))
    await asyncio.sleep(0)  # now the task runs up to its wait for the step
    held.open()
    assert await aborting
    assert engine.llm_engine.num_free_blocks == engine.llm_engine.num_total_blocks
    assert outputs.finished
    assert not await engine.abort("it")
    last = await anext(outputs)
    assert (last.finished, last.error) == (True, None)
    assert last.outputs[0].finish_reason == "abort"
    assert last.outputs[0].token_ids == await read_ids(engine, [5] * 10, greedy(4))
    with pytest.raises(StopAsyncIteration):
        await anext(outputs)


async def test_an_id_may_be_used_again_at_once(engine: AsyncLLMEngine) -> None:
    """Outputs of the first request that are on their way do not reach the second one."""
    expected = await read_ids(engine, [7] * 9, stream(12))
    for _ in range(20):
        outputs = engine.generate(None, stream(100), "same", prompt_token_ids=[5] * 10)
        await anext(outputs)
        await outputs.aclose()
        assert await read_ids(engine, [7] * 9, stream(12), request_id="same") == expected


@pytest.mark.parametrize("where", ["queued", "prefill", "decode"])
async def test_deadline_says_how_far_it_came(make_held: MakeHeld, where: str) -> None:
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    engine, held = make_held(**sizes, enable_prefix_caching=False)
    num_steps = {"queued": 0, "prefill": 1, "decode": 4}[where]
    timers, deadline = hold_timers(), time.monotonic() + 600
    if where == "queued":  # the first request takes all sixteen tokens of a step
        first = asyncio.create_task(read_ids(engine, [9] * 32, stream(3)))
        await held.reached(1)
    reader = asyncio.create_task(
        read_ids(engine, [5] * 40, stream(20), request_id="it", deadline=deadline)
    )
    if where != "queued":
        await held.reached(1)
        held.let(num_steps)
        await held.reached(num_steps + 1)
    await until(lambda: len(timers) == 1)
    timers[0]()
    with pytest.raises(DeadlineExceededError) as caught:
        await reader
    assert caught.value.where == where
    held.open()
    if where == "queued":
        assert len(await first) == 3
    inner = engine.llm_engine
    await until(lambda: inner.num_free_blocks == inner.num_total_blocks)


async def test_a_deadline_that_has_passed(engine: AsyncLLMEngine) -> None:
    steps = engine.stats().num_steps
    with pytest.raises(DeadlineExceededError) as caught:
        await read_ids(engine, [5], stream(3), deadline=time.monotonic() - 1)
    assert caught.value.where == "queued"
    assert engine.stats().num_steps == steps


async def test_max_queue_s_ends_no_request_that_started(make_held: MakeHeld) -> None:
    engine, held = make_held(max_num_seqs=1)

    def begin(num_tokens: int) -> asyncio.Task[list[int]]:
        return asyncio.create_task(read_ids(engine, [9] * 8, stream(num_tokens), max_queue_s=600.0))

    timers = hold_timers()
    first = begin(6)
    await held.reached(1)
    second = begin(3)
    await until(lambda: len(timers) == 2)
    for timer in timers:
        timer()
    with pytest.raises(DeadlineExceededError) as caught:
        await second
    assert caught.value.where == "queued"
    held.open()
    assert len(await first) == 6, "a request that has started goes on"


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (errors.RequestFailedError("the end of its text was lost"), "error"),
        (errors.RequestIgnoredError("too many tokens"), "too long"),
        (None, "length"),
    ],
)
async def test_the_outcome_names_the_failure(failure: Any, outcome: str) -> None:
    table = RequestTable(Admission(QueueLimits()), lambda live: None, False)
    live = table.open(GenerateRequest(prompt_token_ids=[4]), False)
    parts = [CompletionOutput(0, "a", (5,), None, None, finish_reason="length")]
    output = RequestOutput(live.request_id, None, [4], None, parts, True, failure=failure)
    table.receive([(live, output)])
    assert (live.outcome, live.mailbox.error) == (outcome, failure)
