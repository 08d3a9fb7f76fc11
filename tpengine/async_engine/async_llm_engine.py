"""`AsyncLLMEngine`: many requests at once from an event loop, the engine on a thread of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpengine.async_engine.admission import QueueLimits
from tpengine.async_engine.generate_request import GenerateRequest
from tpengine.async_engine.mailbox import Mailbox
from tpengine.async_engine.request_table import Intake, RequestBook
from tpengine.async_engine.text_worker import TextWorker
from tpengine.async_engine.ticket import Ticket
from tpengine.config import ModelConfig
from tpengine.engine.engine_stats import EngineStats, ServiceHealth, judge_health
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.prompt import Prompt
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, EngineError, RequestAbortedError, TPEngineError
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

START_S = 3600.0
SHUTDOWN_S = 30.0
MAX_STEP_S = 30.0
_CUT_OFF_S = 2.0
"""What a step gets to end, at least, so that those who are cut off leave in order."""
_POLL_S = 0.01


class AsyncLLMEngine:
    """An `LLMEngine` on its own thread, behind `async` methods.

    It belongs to the event loop that uses it first, until it has no requests; `stats`, `health` and
    the constructor, which blocks while the model is loaded, may be called from anywhere.

    Args:
        build: makes the engine; called on the engine's thread, where Ray knows the placement group
            of an actor that it runs in, but not that of a task: in a group, use an actor.
        limits: of the queue.
        max_step_s: an engine that has not finished a step for so long is not ready.
        start_timeout_s: how long `build` may take.
        log_requests: write a line when a request ends.

    Raises:
        EngineError: whatever kept the engine from starting.
    """

    def __init__(
        self,
        build: Callable[[], LLMEngine],
        limits: QueueLimits | None = None,
        *,
        max_step_s: float = MAX_STEP_S,
        start_timeout_s: float = START_S,
        log_requests: bool = True,
    ) -> None:
        self._max_step_s = max_step_s
        limits = limits or QueueLimits()
        self._book = RequestBook(build, limits, start_timeout_s, log_requests)
        self._engine = self._book.engine
        self._texts = TextWorker(self._engine, limits.max_requests)

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, limits: QueueLimits | None = None
    ) -> AsyncLLMEngine:
        """Builds the engine and waits until it is ready.

        Raises:
            EngineError: an argument, the model or the memory does not allow it; see the message.
        """
        return cls(partial(LLMEngine.from_engine_args, args), limits)

    def generate(
        self,
        inputs: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        max_queue_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serves one request, given by its parts; see `serve`."""
        request = GenerateRequest(
            prompt=inputs,
            prompt_token_ids=prompt_token_ids,
            params=sampling_params or SamplingParams(),
            request_id=request_id,
            priority=priority,
            deadline=deadline,
            max_queue_s=max_queue_s,
        )
        return self.serve(request)

    async def serve(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Serves one request, and yields its outputs as the params' `output_kind` asks; the last is
        `finished`, with finish reason stop or length. What a slow reader has not taken is merged
        into one output. Leaving the iterator (break, aclose, cancellation) aborts the request.

        Raises:
            RequestError, EngineError: see `open`.
        """
        async with self.open(request) as mailbox:
            while True:
                output = await mailbox.take()
                yield output
                if output.finished:
                    return

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[Mailbox]:
        """Serves one request; its outputs come into the mailbox, for those to whom a generator's
        turn for each would cost too much. Leaving the context aborts the request.

        Raises:
            InvalidPromptError, InvalidSamplingParamsError, InvalidPriorityError: as `LLMEngine`;
                among them RequestIgnoredError: it does not fit into the cache.
            DuplicateRequestError: a live request has this id.
            QueueFullError: too much waits already.
            DeadlineExceededError: its deadline or `max_queue_s` has passed.
            RequestAbortedError: somebody else called `abort`, or a drain's time was up.
            RequestFailedError: it went wrong while it ran.
            EngineDrainingError: the engine takes no new requests.
            EngineDeadError: the engine failed or was shut down.
        """
        ticket = await self._submit(request)
        try:
            yield ticket.mailbox
        finally:
            self._book.end(ticket, "left by its reader")

    async def abort(self, request_id: str) -> bool:
        """Ends a request, whose reader gets `RequestAbortedError`; its blocks are free when this
        returns, unless a step takes longer than a minute.

        Returns:
            Whether there was such a request, unfinished.
        """
        ticket = self._book.tickets.get(request_id)
        if ticket is None:
            return False
        error = RequestAbortedError(
            f"request {request_id!r} was aborted", ticket.mailbox.take_unread()
        )
        await self._book.release(ticket, "aborted", error)
        return True

    def owner(self, request_id: str) -> str | None:
        """Owner of an unfinished request, as its `GenerateRequest` named it."""
        ticket = self._book.tickets.get(request_id)
        return None if ticket is None else ticket.owner

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Raises:
            InvalidPromptError: the model has no tokenizer, or the text is no valid Unicode.
        """
        return await self._texts.tokenize(text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids.

        Raises:
            InvalidPromptError: the model has no tokenizer, or an id is none of the vocabulary.
        """
        return await self._texts.detokenize(token_ids, skip_special_tokens)

    async def chat_token_ids(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """A conversation as the ids of a prompt, by the model's chat template.

        Raises:
            InvalidPromptError: there is no tokenizer or template, or it refuses the messages.
        """
        return await self._texts.chat_token_ids(messages, add_generation_prompt)

    def get_model_config(self) -> ModelConfig:
        """What is known of the model."""
        return self._engine.get_model_config()

    def stats(self) -> EngineStats:
        """Figures of this moment; cheap, from any thread."""
        stats = self._engine.stats()
        queues = replace(
            stats.queues,
            num_queued=self._book.admission.num_requests,
            num_queued_tokens=self._book.admission.num_tokens,
        )
        return replace(
            stats, state=self._state(stats.state), queues=queues, refused=dict(self._book.refused)
        )

    def health(self) -> ServiceHealth:
        """Whether the engine lives and gets on; cheap, from any thread."""
        engine = self._engine.health()
        silent_s = max(time.monotonic() - self._book.thread.progress_at, engine.stalled_s)
        return judge_health(
            self._state(engine.state.value), silent_s, self._max_step_s, self._book.thread.failure
        )

    def metrics_registry(self, model_name: str | None = None) -> CollectorRegistry:
        """A registry of its own with the engine's Prometheus metrics.

        Args:
            model_name: their label; default: the name of the model's folder.

        Raises:
            ConfigError: prometheus_client is not installed.
        """
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError("metrics need prometheus_client: pip install 'tpengine[serve]'")
        from tpengine.engine.prometheus import EngineCollector, make_registry

        name = model_name or Path(self.get_model_config().model).name
        return make_registry(EngineCollector(name, self.stats, self._engine.figures))

    def metrics_text(self, model_name: str | None = None) -> bytes:
        """Those metrics in Prometheus' text format.

        Raises:
            ConfigError: prometheus_client is not installed.
        """
        registry = self.metrics_registry(model_name)
        from prometheus_client import generate_latest

        return generate_latest(registry)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine inside, for those who only read: it belongs to its thread."""
        return self._engine

    async def drain(self, timeout_s: float) -> int:
        """Takes no new requests from now on, and lets those that it has finish.

        Returns:
            Number of requests that were aborted because they had not finished by then; their blocks
            are free unless the step that runs takes longer than two more seconds.
        """
        book = self._book
        if book.intake is Intake.OPEN:
            book.intake = Intake.DRAINING
        end = time.monotonic() + timeout_s
        await book.wait_until_empty(timeout_s)
        why = f"the engine ends, and gave its requests {timeout_s:.1f} s to finish"
        # A step that hangs must not hold up the end for longer than was asked for.
        return await book.cut_off(why, max(_CUT_OFF_S, end - time.monotonic()))

    async def shutdown(self, step_s: float = SHUTDOWN_S) -> None:
        """Ends the engine and its thread; requests that remain get `EngineDeadError`. A second call
        does nothing.

        Args:
            step_s: how many seconds the step that is being computed may still take; what comes
                after it, the end of the ranks, has thirty.

        Raises:
            EngineError: the step, or the end of the ranks, took longer; the thread hangs in it.
        """
        book = self._book
        book.close()
        self._texts.stop()
        thread = book.thread
        await self._wait_until(lambda: thread.stop(0) or thread.ended, step_s, "a step")
        await self._wait_until(lambda: thread.stop(0), SHUTDOWN_S, "the end of its ranks")

    @staticmethod
    async def _wait_until(is_done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Not by one long `join`, which would hold up the loop for the rest of a step."""
        start = time.monotonic()
        while not is_done():
            if time.monotonic() - start > limit_s:
                raise EngineError(
                    f"the engine's thread did not end within {limit_s:g} s: it hangs in {what}"
                )
            await asyncio.sleep(_POLL_S)

    async def _submit(self, request: GenerateRequest) -> Ticket:
        """Checks a request and gives it to the engine."""
        try:
            ticket = self._book.open(request)
            try:
                checked = self._texts.check(request)
                if isinstance(checked, asyncio.Future):
                    checked = await ticket.mailbox.unless_failed(checked)
                self._book.enter(ticket, checked)
            except BaseException as error:
                self._book.end(ticket, f"refused: {type(error).__name__}")
                raise
        except TPEngineError as error:
            self._book.refused[type(error).__name__] += 1
            raise
        return ticket

    def _state(self, group_state: str) -> str:
        """The engine's state, seen from outside."""
        book = self._book
        if book.thread.ended or book.intake is Intake.CLOSED:
            return "dead"
        if book.intake is Intake.DRAINING and group_state != "dead":
            return "draining"
        return group_state
