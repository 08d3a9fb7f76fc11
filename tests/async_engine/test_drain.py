"""The end of a drain: a request that is cut off keeps its output, and no wait is too long."""

from __future__ import annotations

import asyncio

import pytest
from support.waiting import wait_until

from async_engine.conftest import MakeHeld
from async_engine.tools import TIMEOUT_S, Gate, read_ids, stream
from tpengine import AsyncLLMEngine
from tpengine.async_engine import async_llm_engine
from tpengine.errors import EngineError, RequestAbortedError


def step_while_the_loop_is_blocked(engine: AsyncLLMEngine, held: Gate) -> None:
    """Lets a step through, and returns when its outputs are on their way to the event loop."""
    before = engine.stats().step_seconds["hand_over"]
    held.let(1)
    wait_until(lambda: engine.stats().step_seconds["hand_over"] != before, TIMEOUT_S)


async def test_a_request_that_ends_with_a_drain_is_whole(make_held: MakeHeld) -> None:
    """Its last output is on its way when the time is over; the reader gets all outputs."""
    engine, held = make_held()
    outputs = engine.generate(None, stream(6), prompt_token_ids=[4])
    held.let(1)
    token_ids = list((await anext(outputs)).outputs[0].token_ids)
    held.let(4)
    await held.reached(6)
    await asyncio.sleep(0)
    step_while_the_loop_is_blocked(engine, held)
    assert await engine.drain(0) == 0  # in this turn of the loop; `run_async` bounds it
    async for output in outputs:
        token_ids += output.outputs[0].token_ids
    assert output.finished
    assert len(token_ids) == 6


async def test_a_request_that_is_cut_off_keeps_its_output(make_held: MakeHeld) -> None:
    """Also the output that is on its way, while the reader waits for it."""
    engine, held = make_held()
    outputs = engine.generate(None, stream(6), prompt_token_ids=[4])
    held.let(1)
    await anext(outputs)
    await held.reached(2)
    reader = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    step_while_the_loop_is_blocked(engine, held)
    held.open()
    assert await engine.drain(0) == 1
    with pytest.raises(RequestAbortedError) as caught:
        await reader
    assert len(caught.value.output.outputs[0].token_ids) == 1
    assert engine.llm_engine.num_free_blocks == engine.llm_engine.num_total_blocks


async def test_a_step_that_hangs_does_not_prolong_the_drain(
    make_held: MakeHeld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm_engine, "_CUT_OFF_S", 0.1)
    engine, held = make_held()
    outputs = engine.generate(None, stream(6), prompt_token_ids=[4])
    reader = asyncio.ensure_future(anext(outputs))
    await held.reached(1)
    assert await engine.drain(0.1) == 1
    with pytest.raises(RequestAbortedError):
        await reader
    with pytest.raises(EngineError, match="hangs in a step"):
        await engine.shutdown(0.1)
    held.open()


async def test_drains_at_once_all_return(make_held: MakeHeld) -> None:
    engine, held = make_held()
    reader = asyncio.create_task(read_ids(engine, [4], stream(3)))
    await held.reached(1)
    draining = [asyncio.create_task(engine.drain(TIMEOUT_S)) for _ in range(3)]
    await asyncio.sleep(0)
    held.open()
    _, waiting = await asyncio.wait(draining, timeout=TIMEOUT_S / 2)
    assert not waiting, "a drain waits for requests that have ended"
    assert [task.result() for task in draining] == [0, 0, 0]
    assert len(await reader) == 3
