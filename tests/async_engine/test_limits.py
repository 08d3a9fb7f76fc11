"""A queue that is full says so at once; what waits is served in its order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from async_engine.conftest import MakeEngine
from async_engine.tools import Gate, read_ids, run_async, stream, until
from tpengine import AsyncLLMEngine
from tpengine.engine.admission import QueueLimits
from tpengine.errors import ConfigError, InvalidPriorityError, InvalidPromptError, QueueFullError

MakeGate = Callable[[AsyncLLMEngine], Gate]


def test_a_full_queue_refuses_at_once_and_serves_again(make: MakeEngine, gate: MakeGate) -> None:
    engine = make(QueueLimits(max_requests=4), max_num_seqs=2)
    held = gate(engine)

    async def ask() -> None:
        running = [asyncio.create_task(read_ids(engine, [i + 4], stream(4))) for i in range(2)]
        await held.reached(1)
        held.let(1)
        await held.reached(2)
        assert engine.stats().queues.num_queued <= 1, "who had its step does not wait"
        waiting = [asyncio.create_task(read_ids(engine, [i + 9], stream(4))) for i in range(4)]
        await until(lambda: engine.stats().queues.num_queued == 4)
        start = time.monotonic()
        for _ in range(500):
            with pytest.raises(QueueFullError, match="4 requests wait") as caught:
                await read_ids(engine, [7], stream(4))
            assert 0 < caught.value.retry_after_s < 60
        assert time.monotonic() - start < 2.5, "a step is going on, and nobody waits for it"
        assert engine.stats().refused == {"QueueFullError": 500}
        held.open()
        assert [len(one) for one in await asyncio.gather(*running, *waiting)] == [4] * 6
        assert len(await read_ids(engine, [7], stream(4))) == 4

    run_async(ask())


def test_tokens_count_as_well(make: MakeEngine, gate: MakeGate) -> None:
    engine = make(QueueLimits(max_requests=100, max_tokens=50), max_num_seqs=1)
    held = gate(engine)

    async def ask() -> None:
        first = asyncio.create_task(read_ids(engine, [4] * 60, stream(4)))  # alone it may be longer
        await held.reached(1)
        held.let(1)
        await held.reached(2)
        waiting = [asyncio.create_task(read_ids(engine, [9] * 25, stream(4))) for _ in range(2)]
        await until(lambda: engine.stats().queues.num_queued_tokens == 50)
        with pytest.raises(QueueFullError, match="50 prompt tokens wait already; with 1 more"):
            await read_ids(engine, [7], stream(4))
        assert engine.stats().queues.num_queued == 2
        held.open()
        assert [len(one) for one in await asyncio.gather(first, *waiting)] == [4] * 3
        assert engine.stats().queues.num_queued_tokens == 0

    run_async(ask())


def test_a_refused_prompt_leaves_its_place(make: MakeEngine) -> None:
    engine = make(QueueLimits(max_requests=1))

    async def ask() -> None:
        for _ in range(3):
            with pytest.raises(InvalidPromptError, match="no id of the vocabulary"):
                await read_ids(engine, [100_000], stream(4))
        assert engine.stats().queues.num_queued == 0
        assert len(await read_ids(engine, [7], stream(4))) == 4

    run_async(ask())


def test_priorities_are_kept(make: MakeEngine, gate: MakeGate) -> None:
    engine = make(max_num_seqs=1, scheduling_policy="priority")
    held = gate(engine)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        assert len(await read_ids(engine, [len(name) + 4], stream(2), priority=priority)) == 2
        order.append(name)

    async def ask() -> None:
        tasks = [asyncio.create_task(one("first", 0))]
        await held.reached(1)
        for name, priority in (("low", 5), ("middle", 0), ("high", -5)):
            tasks.append(asyncio.create_task(one(name, priority)))
        await until(lambda: engine.stats().queues.num_queued >= 3)
        held.open()
        await asyncio.gather(*tasks)

    run_async(ask())
    assert order == ["first", "high", "middle", "low"]


def test_priorities_need_their_policy(engine: AsyncLLMEngine) -> None:
    async def ask() -> None:
        with pytest.raises(InvalidPriorityError):
            await read_ids(engine, [5], stream(2), priority=-1)

    run_async(ask())


@pytest.mark.parametrize("name", ["max_requests", "max_tokens"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        QueueLimits(**{name: 0})
