"""Short ways to use an asynchronous engine, and to hold it between steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from support.engines import greedy

from tpengine import AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams

TIMEOUT_S = 60.0
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
Answer = TypeVar("Answer")


def run_async(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Runs it on a loop of its own, for a bounded time; it must leave no task behind."""

    async def bounded() -> Answer:
        answer = await asyncio.wait_for(work, TIMEOUT_S)
        for _ in range(5):  # generators that were dropped are closed by tasks of their own
            await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, f"tasks are left: {others}"
        return answer

    return asyncio.run(bounded())


def stream(num_tokens: int = 16, **fields: Any) -> SamplingParams:
    """Greedy deltas of a fixed number of tokens."""
    return greedy(num_tokens, output_kind=DELTA, **fields)


async def read_ids(
    engine: AsyncLLMEngine, prompt: Sequence[int], params: SamplingParams, **kwargs: Any
) -> list[int]:
    """All ids of a request's first sequence."""
    token_ids: list[int] = []
    async for output in engine.generate(None, params, prompt_token_ids=list(prompt), **kwargs):
        if params.output_kind is not DELTA:
            token_ids.clear()
        token_ids += output.outputs[0].token_ids
    return token_ids


async def last_output(engine: AsyncLLMEngine, *args: Any, **kwargs: Any) -> RequestOutput:
    """The last output of a request."""
    outputs = [output async for output in engine.generate(*args, **kwargs)]
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    return outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.002)


def fire_timer(engine: AsyncLLMEngine, request_id: str) -> None:
    """Lets the time of a request be up: when it is must not depend on who else uses this machine.
    Its timer was set for a moment that a test does not reach."""
    (timer,) = engine._requests._live[request_id].timers
    assert timer.when() > asyncio.get_running_loop().time() + 1
    timer._run()


@dataclass
class Gate:
    """Stands before the model: a step is computed when `let` allows it.

    Attributes:
        steps: by step that has come to the gate: slots in it, and blocks that were free.
    """

    engine: AsyncLLMEngine
    steps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        inner = self.engine.llm_engine
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()
        execute = inner._executor.execute_model

        def held(step: Any) -> Any:
            self.steps.append((len(step.slots), inner.num_free_blocks))
            end = time.monotonic() + TIMEOUT_S
            while not self._is_open.is_set() and not self._permits.acquire(timeout=0.01):
                assert time.monotonic() < end, "nobody let this step through"
            return execute(step)

        inner._executor.execute_model = held

    def let(self, count: int = 1) -> None:
        """Lets so many steps through."""
        self._permits.release(count)

    def open(self) -> None:
        """Lets all through from now on."""
        self._is_open.set()

    async def reached(self, count: int) -> None:
        """Waits until that many steps have come."""
        await until(lambda: len(self.steps) >= count)


class TokenizerGate:
    """Holds the thread that tokenizes, inside the first text.

    Attributes:
        inside: set when it is there.
        go_on: to be set to let it go on.
        texts: in the order in which they were begun.
    """

    def __init__(self, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.texts: list[str] = []
        tokenizer = engine.llm_engine.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode

        def held(text: str, *args: Any) -> list[int]:
            self.texts.append(text)
            self.inside.set()
            assert self.go_on.wait(TIMEOUT_S)
            return encode(text, *args)

        monkeypatch.setattr(tokenizer, "encode", held)
