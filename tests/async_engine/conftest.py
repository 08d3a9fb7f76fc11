"""Engines on a thread, and ways to hold them between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.event_loop import run_async
from support.models import ModelShop
from support.oracle import Oracle
from support.waiting import wait_until
from support.zoo import PLAIN

from async_engine.tools import TIMEOUT_S, Gate, MakeGate, TokenizerGate
from tpengine import AsyncLLMEngine
from tpengine.async_engine.admission import QueueLimits

MakeEngine = Callable[..., AsyncLLMEngine]
MakeHeld = Callable[..., tuple[AsyncLLMEngine, Gate]]


@pytest.fixture(scope="session")
def folder(models: ModelShop) -> Path:
    return models.folder(PLAIN, tokenizer=True)


@pytest.fixture(scope="session")
def oracle(models: ModelShop, folder: Path) -> Oracle:
    return models.oracle(folder)


@pytest.fixture
def make(folder: Path) -> Iterator[MakeEngine]:
    """Makes engines and ends them; none of their threads remains."""
    engines: list[AsyncLLMEngine] = []
    before = set(threading.enumerate())

    def build(limits: QueueLimits | None = None, **args: Any) -> AsyncLLMEngine:
        own = {name: args.pop(name) for name in ("max_step_s", "log_requests") if name in args}
        engines.append(AsyncLLMEngine(partial(make_engine, folder, **args), limits, **own))
        return engines[-1]

    yield build
    for engine in engines:
        run_async(engine.shutdown())
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine(partial(make_engine, folder))
    yield engine
    run_async(engine.shutdown())


@pytest.fixture
def engine(shared: AsyncLLMEngine) -> Iterator[AsyncLLMEngine]:
    """An engine that the tests of a file share; after each test all blocks are free."""
    yield shared
    # A reader that leaves does not wait for the step that frees the blocks of its request.
    inner = shared.llm_engine
    wait_until(lambda: inner.num_free_blocks == inner.num_total_blocks, TIMEOUT_S)
    assert shared.stats().queues.num_queued == shared.stats().queues.num_queued_tokens == 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeGate]:
    """Makes gates, which let a test decide when each step of an engine is computed."""
    gates: list[Gate] = []

    def hold(engine: AsyncLLMEngine) -> Gate:
        gates.append(Gate(engine, monkeypatch))
        return gates[-1]

    yield hold
    for gate in gates:
        gate.open()


@pytest.fixture
def make_held(make: MakeEngine, gate: MakeGate) -> MakeHeld:
    """Makes engines, each with a gate for its steps."""

    def build(*args: Any, **options: Any) -> tuple[AsyncLLMEngine, Gate]:
        engine = make(*args, **options)
        return engine, gate(engine)

    return build


@pytest.fixture
def tokenizer_gate(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TokenizerGate]:
    held = TokenizerGate(engine, monkeypatch)
    yield held
    held.go_on.set()
