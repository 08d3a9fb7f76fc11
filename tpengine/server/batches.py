"""Calls with many prompts, each of which has one output: serves them several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tpengine.engine.requests import GenerateRequest
from tpengine.errors import InvalidPromptError, QueueFullError
from tpengine.outputs import RequestOutput
from tpengine.server.state import ServerState

MAX_INPUTS = 2048
"""Prompts of a call; OpenAI's limit."""
_MOST_S = 1.0
"""Until a prompt that found the queue full tries again, if no other one of its call ends."""


@contextmanager
def naming_input(name: str) -> Iterator[None]:
    """Names the prompt in errors of the engine, which does not know what else its call has.

    Args:
        name: of its field, such as `input[3]`.
    """
    try:
        yield
    except InvalidPromptError as error:
        text = str(error)
        if error.field == "prompt_token_ids":
            text = text.replace(error.field, name, 1)
        elif error.field is None:
            text = f"{name}: {text}"
        else:  # it names a parameter, or the prompt already
            raise
        error.args, error.field = (text, *error.args[1:]), name
        raise


async def serve_all(
    state: ServerState, requests: Iterable[tuple[str, GenerateRequest]]
) -> list[RequestOutput]:
    """Serves the requests of a call; returns their outputs in the same order. The first error ends
    all of them.

    They take at most half of the places of the queue. That it is full is an error only if it has no
    place for the first of them; later ones wait, and try again when another one has its output.

    Args:
        requests: each with the name of its field, see `naming_input`; taken when they begin.

    Raises:
        RequestError, EngineError: see `ServerState.open`; or what `requests` raises.
    """
    batch = _Batch(state, enumerate(requests))
    try:
        with state.begun():
            async with asyncio.TaskGroup() as tasks:
                for _ in range(max(1, state.limits.queue.max_requests // 2)):
                    tasks.create_task(batch.work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [batch.outputs[place] for place in range(len(batch.outputs))]


@dataclass(slots=True)
class _Batch:
    """Requests of one call.

    Attributes:
        left: those that have not begun, with their places and names.
        outputs: by place.
        num_open: requests that have a place in the queue or in the engine, or try to get one.
        next_end: set when one of them is done.
    """

    state: ServerState
    left: Iterator[tuple[int, tuple[str, GenerateRequest]]]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    num_open: int = 0
    next_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def work(self) -> None:
        """Serves one request after the other."""
        for place, (name, request) in self.left:
            while place not in self.outputs:
                next_end = self.next_end
                try:
                    with naming_input(name):
                        self.outputs[place] = await self._try(request)
                except QueueFullError as error:
                    if not self.num_open and not self.outputs:
                        raise
                    with suppress(TimeoutError):
                        await asyncio.wait_for(next_end.wait(), min(error.retry_after_s, _MOST_S))

    async def _try(self, request: GenerateRequest) -> RequestOutput:
        self.num_open += 1
        try:
            async with self.state.open(request) as mailbox:
                output = await mailbox.take()
        finally:
            self.num_open -= 1
        self.next_end.set()
        self.next_end = asyncio.Event()
        return output
