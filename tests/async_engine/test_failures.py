"""An error of the engine reaches every reader once, with its name."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.engines import make_engine
from support.event_loop import run_async
from support.patches import fail_at, on_call
from support.waiting import wait_until

from async_engine import tools
from async_engine.conftest import MakeEngine, MakeHeld
from tpengine import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams, errors
from tpengine.async_engine import async_llm_engine
from tpengine.executor.local_executor import LocalExecutor
from tpengine.worker.worker import Worker


def test_failing_step_reaches_each_once(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    fail_at(monkeypatch, Worker, "execute_model", 5, OSError("the device is on fire"))

    async def one(index: int) -> Exception:
        outputs = engine.generate(None, tools.stream(50), prompt_token_ids=[index + 4] * 9)
        with pytest.raises(errors.EngineDeadError, match="the device is on fire") as caught:
            async for _ in outputs:
                pass
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        assert isinstance(caught.value.__cause__, OSError)
        return caught.value

    async def ask() -> None:
        raised = await asyncio.gather(*(one(index) for index in range(8)))
        assert len({id(error) for error in raised}) == 8, "each has a traceback of its own"
        with pytest.raises(errors.EngineDeadError, match="the device is on fire"):
            await tools.read_ids(engine, [5], tools.stream(3))
        assert not await engine.abort("unknown")
        assert await engine.drain(5) == 0

    run_async(ask())
    health = engine.health()
    assert (health.state, health.alive, health.ready) == ("dead", False, False)
    assert "the device is on fire" in health.reason
    assert engine.stats().state == "dead"
    for thread in threading.enumerate():
        if thread.name == "tpengine-engine":
            thread.join(10)
            assert not thread.is_alive()


async def test_the_reason_is_known_while_the_ranks_end(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery has given up, and ends the ranks, which may take half a minute."""
    loss = errors.RankLoss(1, "10.0.0.7, pid 4711", 1, 5, "execute_model", "killed by signal 9")
    engine, ends, may_end = make(max_recoveries=0), threading.Event(), threading.Event()

    def wait(_: LocalExecutor) -> None:
        ends.set()
        assert may_end.wait(tools.TIMEOUT_S)

    monkeypatch.setattr(Worker, "execute_model", Mock(side_effect=errors.GroupLostError(loss)))
    on_call(monkeypatch, LocalExecutor, "shutdown", wait)
    request = asyncio.create_task(tools.read_ids(engine, [5], tools.stream(3)))
    await asyncio.to_thread(ends.wait, tools.TIMEOUT_S)
    reason = engine.health().reason
    may_end.set()
    for word in ("the engine is dead: EngineDeadError", "max_recoveries = 0", "pid 4711"):
        assert word in reason
    with pytest.raises(errors.EngineDeadError, match="max_recoveries = 0"):
        await request


OUTGROWN = SamplingParams(n=2, max_tokens=300, ignore_eos=True, seed=1)
"""Two sequences share 300 tokens; with 300 tokens of its own each, they outgrow 41 blocks."""


@pytest.mark.parametrize(
    ("num_tokens", "params", "words"),
    [
        (641, tools.stream(3), "641 tokens, more than max_model_len = 640"),
        (300, OUTGROWN, "the KV cache has 41"),
    ],
    ids=["prompt", "output"],
)
async def test_a_request_that_is_too_long(
    make: MakeEngine, num_tokens: int, params: SamplingParams, words: str
) -> None:
    """A stream ends with an output that says so; a server gets an error, and at once if the prompt
    alone is too long."""
    engine = make(num_device_blocks_override=41, max_model_len=640)
    prompt = [5] * num_tokens
    output = await tools.last_output(engine, None, params, prompt_token_ids=prompt)
    assert words in str(output.error)
    assert {completion.finish_reason for completion in output.outputs} == {"length"}
    assert any(completion.token_ids for completion in output.outputs) == (params is OUTGROWN)
    num_steps = engine.stats().num_steps
    with pytest.raises(errors.RequestIgnoredError, match=words):
        await tools.read_mailbox(engine, prompt, params)
    assert (engine.stats().num_steps > num_steps) == (params is OUTGROWN)
    assert engine.stats().refused == ({} if params is OUTGROWN else {"RequestIgnoredError": 1})
    assert len(await tools.read_ids(engine, [6] * 9, tools.stream(20))) == 20
    assert engine.llm_engine.num_free_blocks == engine.llm_engine.num_total_blocks


def test_an_error_of_the_build_is_raised_unchanged(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(errors.ModelLoadError, match=r"no config\.json"):
        AsyncLLMEngine.from_engine_args(EngineArgs(str(tmp_path)))
    assert set(threading.enumerate()) == before


def test_an_engine_that_takes_too_long_to_build(folder: Path) -> None:
    built, ended = threading.Event(), threading.Event()

    def slow() -> LLMEngine:
        assert built.wait(tools.TIMEOUT_S)
        inner = make_engine(folder)
        shutdown = inner.shutdown

        def tell() -> None:
            shutdown()
            ended.set()

        inner.shutdown = tell  # type: ignore[method-assign]
        return inner

    with pytest.raises(errors.EngineError, match="not ready within 0 s"):
        AsyncLLMEngine(slow, start_timeout_s=0.1)
    built.set()
    assert ended.wait(tools.TIMEOUT_S), "an engine that is ready too late is ended"


def test_shutdown_fails_requests_and_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    engine = AsyncLLMEngine(partial(make_engine, folder))

    async def ask() -> None:
        await engine.tokenize("this starts the thread for texts")
        readers = [
            asyncio.create_task(tools.read_ids(engine, [4], tools.stream(600))) for _ in range(3)
        ]
        await tools.until(lambda: engine.stats().queues.num_running == 3)
        await engine.shutdown()
        await engine.shutdown()
        for reader in readers:
            with pytest.raises(errors.EngineDeadError, match="was shut down"):
                await reader
        with pytest.raises(errors.EngineDeadError, match="was shut down"):
            await tools.read_ids(engine, [4], tools.stream(3))
        with pytest.raises(errors.EngineDeadError, match="was shut down"):
            await engine.tokenize("hello")

    run_async(ask())
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) == before


async def test_health_means_progress(make_held: MakeHeld, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, held = make_held(max_step_s=100.0)
    ahead_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(async_llm_engine, "time", clock)
    thread, seen = engine._thread, engine._thread.progress_at
    await tools.until(lambda: thread.progress_at > seen)  # an idle engine is ready
    reader = asyncio.create_task(tools.read_ids(engine, [4], tools.stream(10)))
    await held.reached(1)
    assert engine.health().ready
    ahead_s[0] = 200.0
    health = engine.health()
    assert (health.state, health.alive, health.ready) == ("running", True, False)
    assert health.seconds_since_progress >= 200
    assert "no step was finished for 20" in health.reason
    ahead_s[0] = 0.0
    held.open()
    assert len(await reader) == 10
    await tools.until(lambda: engine.health().ready)


async def test_steps_without_progress(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose steps do nothing while requests wait is not ready, and does not
    run in a busy loop."""
    engine = make(max_step_s=1.0)
    pauses: list[float] = []

    def nothing() -> list[Any]:
        pauses.append(engine._thread._pause_s)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(engine.llm_engine, "step", nothing)
        reader = asyncio.create_task(tools.read_ids(engine, [4], tools.stream(10)))
        await tools.until(lambda: len(pauses) > 1 and not engine.health().ready)
    assert min(pauses[1:]) > 0, "it pauses before each step but the first"
    assert len(await reader) == 10


@pytest.mark.parametrize("way", ["read", "abort", "drain"])
def test_a_loop_that_is_closed_while_a_caller_waits(make_held: MakeHeld, way: str) -> None:
    """Its request ends without a reader, and what it waits for is forgotten: the next loop works,
    and the engine ends."""
    engine, held = make_held()

    async def begin() -> list[Any]:
        reading = tools.read_ids(engine, [4], tools.stream(600), request_id="it")
        left = [asyncio.create_task(reading)]
        await held.reached(1)
        if way != "read":
            waiting = engine.abort("it") if way == "abort" else engine.drain(600)
            left.append(asyncio.create_task(waiting))
            await asyncio.sleep(0)
        return left

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(begin())
    loop.close()
    held.open()
    if way != "drain":
        assert len(run_async(tools.read_ids(engine, [4], tools.stream(5), request_id="it"))) == 5
        inner = engine.llm_engine
        wait_until(lambda: inner.num_free_blocks == inner.num_total_blocks)
        wait_until(lambda: not engine._requests._freed)
    run_async(engine.shutdown())
    del left
