"""Short ways to use an `AsyncLLMEngine`, and to hold it between steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from client.talks import collect
from support.engines import greedy
from support.patches import on_call

from tpengine import AsyncLLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from tpengine.engine.requests import GenerateRequest
from tpengine.worker.worker import Worker

TIMEOUT_S = 60.0
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def stream(num_tokens: int = 16, **fields: Any) -> SamplingParams:
    """Returns params for greedy deltas of a fixed number of tokens."""
    return greedy(num_tokens, output_kind=DELTA, **fields)


async def read_ids(
    engine: AsyncLLMEngine, prompt: Sequence[int], params: SamplingParams, **kwargs: Any
) -> tuple[int, ...]:
    """Returns all ids of a request's first sequence."""
    token_ids: list[int] = []
    async for output in engine.generate(None, params, prompt_token_ids=list(prompt), **kwargs):
        if params.output_kind is not DELTA:
            token_ids.clear()
        token_ids += output.outputs[0].token_ids
    return tuple(token_ids)


async def read_mailbox(
    engine: AsyncLLMEngine, prompt: list[int], params: SamplingParams, **fields: Any
) -> list[int]:
    """Returns all ids of a stream's first sequence, read as a server does."""
    token_ids: list[int] = []
    request = GenerateRequest(prompt_token_ids=prompt, params=params, **fields)
    async with engine.open(request) as mailbox:
        while True:
            output = await mailbox.take()
            token_ids += output.outputs[0].token_ids
            if output.finished:
                return token_ids


async def last_output(engine: AsyncLLMEngine, *args: Any, **kwargs: Any) -> RequestOutput:
    """Returns the last output of a request."""
    outputs = await collect(engine.generate(*args, **kwargs))
    assert [output.finished for output in outputs].index(True) == len(outputs) - 1
    return outputs[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.002)


def hold_timers() -> list[Callable[[], None]]:
    """Returns a list. From now on each timer of more than 100 s that the running loop gets is added
    to it. A test calls one of them to make a deadline pass at the moment that the test chooses."""
    loop, held = asyncio.get_running_loop(), list[Callable[[], None]]()
    call_later = loop.call_later

    def later(delay: float, callback: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
        if delay > 100:
            held.append(partial(callback, *args))
        return call_later(delay, callback, *args, **kwargs)

    loop.call_later = later  # type: ignore[assignment]
    return held


class Gate:
    """Holds each step of an engine before the model until `let` or `open` allows it.

    Attributes:
        steps: for each step that has come: the number of its slots, and of free blocks.
    """

    def __init__(self, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[int, int]] = []
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()

        def hold(_: Worker, step: Any) -> None:
            self.steps.append((len(step.slots), engine.llm_engine.num_free_blocks))
            end = time.monotonic() + TIMEOUT_S
            while not self._is_open.is_set() and not self._permits.acquire(timeout=0.01):
                assert time.monotonic() < end, "the test did not let this step through"

        on_call(monkeypatch, Worker, "execute_model", hold)

    def let(self, count: int = 1) -> None:
        """Lets that many steps through."""
        self._permits.release(count)

    def open(self) -> None:
        """Lets all steps through from now on."""
        self._is_open.set()

    async def reached(self, count: int) -> None:
        """Waits until that many steps have come."""
        await until(lambda: len(self.steps) >= count)


MakeGate = Callable[[AsyncLLMEngine], Gate]


class TokenizerGate:
    """Holds the thread for texts inside the first text.

    Attributes:
        inside: set when the thread is there.
        go_on: set it to let the thread go on.
        texts: in the order in which the thread began them.
    """

    def __init__(self, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.texts: list[str] = []

        def hold(text: str, *_: Any) -> None:
            self.texts.append(text)
            self.inside.set()
            assert self.go_on.wait(TIMEOUT_S)

        on_call(monkeypatch, engine.llm_engine.tokenizer, "encode", hold)
