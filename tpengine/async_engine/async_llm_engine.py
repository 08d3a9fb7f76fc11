"""`AsyncLLMEngine`: serves many requests at once from an event loop; its engine has a thread.

It opens, aborts and ends requests. Their tokens do not pass this file; the head of
`server/grpc/service.py` lists the way of a token from rank 0 to a gRPC client.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tpengine import errors
from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.async_engine.engine_thread import EngineThread
from tpengine.async_engine.mailbox import Mailbox
from tpengine.async_engine.request_table import AsyncStream, LiveRequest, RequestTable
from tpengine.async_engine.text_worker import TextWorker
from tpengine.config import ModelConfig, ParallelConfig, SchedulerConfig
from tpengine.engine.llm_engine import LLMEngine
from tpengine.engine.requests import (
    GenerateRequest,
    check_token_ids,
    fields_of_params,
    need_tokenizer,
)
from tpengine.engine.stats import EngineStats, ServiceHealth
from tpengine.engine.tokenizer import Tokenizer
from tpengine.engine_args import EngineArgs
from tpengine.inputs import LoRARequest, PoolingParams, PromptInputs
from tpengine.outputs import EmbeddingRequestOutput, RequestOutput
from tpengine.sampling_params import SamplingParams

if TYPE_CHECKING:  # its package is optional
    from tpengine.engine.prometheus import EngineMetrics

START_S = 3600.0
SHUTDOWN_S = 30.0
MAX_STEP_S = 30.0
_FREE_S = 60.0
_CUT_OFF_S = 2.0
"""The least time that a drain gives the present step to end."""
_POLL_S = 0.01


class AsyncLLMEngine:
    """An `LLMEngine` on its own thread, behind `async` methods.

    While it has requests it belongs to the event loop that uses it first. `stats`, `health` and
    the constructor, which blocks while the model is loaded, may be called from any thread.

    Args:
        build: makes the engine. It is called on the engine's thread, where Ray knows the placement
            group of an actor that it runs in, but not that of a task: in a group, use an actor.
        limits: of the queue.
        max_step_s: an engine that has not finished a step for longer is not ready.
        start_timeout_s: how long `build` may take.
        log_requests: log a line when a request ends.

    Attributes:
        llm_engine: for reading only: it belongs to its thread.

    Raises:
        EngineError: the reason why the engine could not start.
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
        limits = limits or QueueLimits()
        self._max_step_s = max_step_s
        self._is_draining = self._is_closed = False  # then no new requests are taken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(build)
        self.llm_engine = self._thread.start(start_timeout_s)
        self._admission = Admission(limits, self.llm_engine.get_scheduler_config().fairness)
        self._requests = RequestTable(self._admission, self._thread.abort, log_requests)
        self._texts = TextWorker(self.llm_engine, limits.max_requests)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        *,
        stat_loggers: Mapping[str, Any] | None = None,
        limits: QueueLimits | None = None,
    ) -> Self:
        """Builds the engine and waits until it is ready.

        Args:
            engine_args: if they are `AsyncEngineArgs`, `disable_log_requests` counts.
            stat_loggers: see `LLMEngine.from_engine_args`.
            limits: of the queue.

        Raises:
            EngineError: an argument, the model or the memory does not allow it; see the message.
        """
        build = partial(LLMEngine.from_engine_args, engine_args, stat_loggers=stat_loggers)
        log_requests = not getattr(engine_args, "disable_log_requests", False)
        return cls(build, limits, log_requests=log_requests)

    def generate(
        self,
        inputs: PromptInputs | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        max_queue_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serves one request, given by its parts, and yields its outputs, as `serve` does.

        Args:
            inputs: text, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: default: `SamplingParams()`.
            request_id: a string that no unfinished request has; None: one is made.
            lora_request: its adapter; needs `enable_lora`.
            prompt_token_ids: the prompt as ids; then text in `inputs` is only echoed.
            priority: in [-1000, 1000], lower is served first; needs scheduling_policy "priority".
            deadline: moment of `time.monotonic` at which the request is ended, in any state.
            max_queue_s: seconds that it may wait for its first step.

        Raises:
            RequestError, EngineError: see `open`; most of them with the first output.
        """
        params = sampling_params or SamplingParams()
        times: dict[str, Any] = {"deadline": deadline, "max_queue_s": max_queue_s}
        own: dict[str, Any] = {"request_id": request_id, "lora_request": lora_request}
        request = GenerateRequest(
            inputs, prompt_token_ids, params=params, priority=priority, **times, **own
        )
        return self.serve(request)

    async def encode(
        self,
        inputs: PromptInputs | None = None,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        priority: int = 0,
        deadline: float | None = None,
        max_queue_s: float | None = None,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """Serves one request of a model that makes no tokens, and yields its only output.

        Args:
            pooling_params: default: `PoolingParams()`.
            inputs, request_id, lora_request, prompt_token_ids: see `generate`.
            priority, deadline, max_queue_s: see `generate`.

        Raises:
            RequestError, EngineError: see `open`; most of them with the output.
        """
        params = pooling_params or PoolingParams()
        times: dict[str, Any] = {"deadline": deadline, "max_queue_s": max_queue_s}
        own: dict[str, Any] = {"request_id": request_id, "lora_request": lora_request}
        request = GenerateRequest(
            inputs, prompt_token_ids, pooling_params=params, priority=priority, **times, **own
        )
        async for output in self.serve(request):
            yield EmbeddingRequestOutput.of(output)

    async def add_request(
        self,
        request_id: str,
        inputs: PromptInputs,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncStream:
        """Begins to serve a request, whose outputs the stream yields; see `generate`.

        Args:
            arrival_time: seconds of `time.time`; None: now.

        Raises:
            RequestError, EngineError: see `open`.
        """
        own: dict[str, Any] = {"request_id": request_id, "lora_request": lora_request}
        own |= fields_of_params(params)
        request = GenerateRequest(inputs, arrival_time=arrival_time, **own)
        form = None if request.pooling_params is None else EmbeddingRequestOutput.of
        return AsyncStream(await self._begin(request, True), form)

    async def serve(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Serves one request, and yields its outputs as the params' `output_kind` asks; the last is
        `finished`. Its finish reason is stop, length (with `error` if the prompt, or prompt and
        output, cannot be held), or abort. Outputs that a slow reader has not taken are merged into
        one. Leaving the iterator (break, aclose, cancellation) aborts the request.

        Raises:
            RequestError, EngineError: see `open`.
        """
        live = await self._begin(request, True)
        try:
            async for output in AsyncStream(live):
                yield output
        finally:
            self._requests.finish(live, "left by its reader")

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[Mailbox]:
        """Serves one request, whose outputs come into the mailbox: a server uses it to save the
        cost of a generator. Leaving the context aborts the request.

        Raises:
            InvalidPromptError, InvalidSamplingParamsError, InvalidPriorityError: as `LLMEngine`;
                among them RequestIgnoredError: it is too long for the model or the cache. A grammar
                may go beyond a limit only while the request runs.
            DuplicateRequestError: a live request has this id.
            QueueFullError: too many requests or prompt tokens wait.
            DeadlineExceededError: its deadline or `max_queue_s` has passed.
            RequestAbortedError: another caller aborted it, or a drain's time was over.
            RequestFailedError: it failed while it ran.
            EngineDrainingError: the engine takes no new requests.
            EngineDeadError: the engine failed or was shut down.
        """
        live = await self._begin(request, False)
        try:
            yield live.mailbox
        finally:
            self._requests.finish(live, "left by its reader")

    async def _begin(self, request: GenerateRequest, ends_as_output: bool) -> LiveRequest:
        """Checks a request, and gives it to the engine's thread.

        Args:
            ends_as_output: see `LiveRequest`; False refuses a prompt that is too long at once.

        Raises:
            RequestError, EngineError: see `open`.
        """
        live: LiveRequest | None = None
        try:
            self._bind()
            self._check_open()
            live = self._requests.open(request, ends_as_output)
            checking = self._texts.check(request)
            if isinstance(checking, asyncio.Future):
                checked = await live.mailbox.unless_closed(checking)
            else:
                checked = checking
            if checked is None:  # it was aborted: its stream ends at once
                return live
            self._check_open()
            why = self.llm_engine.why_too_long(len(checked.prompt_token_ids))
            if why is not None and not ends_as_output:
                raise errors.RequestIgnoredError(why)
            self._requests.admit(live, checked)
        except BaseException as error:
            self._requests.refuse(live, error)
            raise
        self._thread.enter(live, checked)
        return live

    async def abort(self, request_id: str) -> bool:
        """Aborts a request. The reader of `generate` gets a last output, with finish reason abort,
        and the reader of `open` gets `RequestAbortedError`. Its blocks are free when this returns,
        but for those that a step in flight uses, unless a step takes longer than a minute.

        Returns:
            Whether there was an unfinished request of this id.
        """
        if (live := self._requests.find(request_id)) is None:
            return False
        await self._requests.abort(live, _FREE_S)
        return True

    def owners(self, names: set[str]) -> dict[str, str]:
        """Returns the owners' names of unfinished requests, by their ids; empty: it has none.

        Args:
            names: ids, or names of which `unique_id` has made ids.
        """
        return {live.request_id: live.owner.name for live in self._requests.named(names)}

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text.

        Raises:
            InvalidPromptError: the model has no tokenizer, or the text is no valid Unicode.
            QueueFullError: too many texts wait.
        """
        encode = partial(self._tokenizer().encode, text, add_special_tokens)
        return await self._texts.run(encode, text)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids.

        Raises:
            InvalidPromptError: the model has no tokenizer, or an id is outside the vocabulary.
            QueueFullError: too many texts wait.
        """
        tokenizer, vocab_size = self._tokenizer(), self.model_config.vocab_size

        def decode() -> str:
            checked = check_token_ids("token_ids", token_ids, vocab_size)
            return tokenizer.decode(checked, skip_special_tokens)

        return await self._texts.run(decode, token_ids)

    async def chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Returns a conversation as the ids of a prompt, by the model's chat template, with the
        tokens of its pictures; for the options see `Tokenizer.render_chat`.

        Raises:
            InvalidPromptError: there is no tokenizer or template, or it refuses the messages.
            QueueFullError: too many texts wait.
        """
        options["add_generation_prompt"] = add_generation_prompt
        work = partial(self.llm_engine.chat_token_ids, messages, **options)
        return await self._texts.run(work, (messages, options))

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests whose end is not known yet, those being checked too."""
        return len(self._requests)

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration."""
        return self.llm_engine.get_model_config()

    async def get_model_config(self) -> ModelConfig:
        """Returns `model_config`."""
        return self.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        """Returns how the engine is spread over ranks."""
        return self.llm_engine.get_parallel_config()

    async def get_scheduler_config(self) -> SchedulerConfig:
        """Returns the limits of a step."""
        return self.llm_engine.get_scheduler_config()

    async def get_lora_config(self) -> Any:
        """Returns the `LoRAConfig`; None: adapters are not served."""
        return self.llm_engine.get_lora_config()

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """Returns the tokenizer of transformers; None for a model folder without one."""
        return self.llm_engine.get_tokenizer()

    @property
    def is_running(self) -> bool:
        """Whether the engine takes steps."""
        return not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return self.health().state == "dead"

    @property
    def errored(self) -> bool:
        """Whether the engine has failed."""
        return self._thread.failure is not None

    def start_background_loop(self) -> None:
        """Has no effect: the engine's thread runs from the start.

        Raises:
            EngineDeadError: it has ended.
        """
        if self.is_stopped:
            raise self._death()

    async def check_health(self) -> None:
        """Raises an error if the engine cannot go on.

        Raises:
            EngineDeadError: it has failed or was shut down.
        """
        self.start_background_loop()

    async def do_log_stats(self, scheduler_outputs: None = None, model_output: None = None) -> None:
        """Logs the line of statistics and calls the added loggers, after the present step.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self.start_background_loop()
        self._thread.put(LLMEngine.do_log_stats)

    def add_logger(self, logger_name: str, logger: Any) -> None:
        """Adds a logger, which is called on the engine's thread; see `LLMEngine.add_logger`."""
        self.llm_engine.add_logger(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        """Removes a logger that `add_logger` has added. The present step may still call it."""
        self.llm_engine.remove_logger(logger_name)

    def stats(self) -> EngineStats:
        """Returns a snapshot of this moment; cheap, from any thread."""
        stats = self.llm_engine.stats()
        num_queued, num_tokens = self._admission.num_requests, self._admission.num_tokens
        queues = replace(stats.queues, num_queued=num_queued, num_queued_tokens=num_tokens)
        state, refused = self._state(stats.state), dict(self._requests.refused)
        return replace(stats, state=state, queues=queues, refused=refused)

    def health(self) -> ServiceHealth:
        """Returns whether the engine lives and makes progress; cheap, from any thread."""
        engine = self.llm_engine.health()
        silent_s = max(time.monotonic() - self._thread.progress_at, engine.stalled_s)
        state, reason = self._state(engine.state.value), ""
        if state == "dead":
            reason = f"the engine is dead: {self._cause() or 'it was shut down'}"
        elif state == "draining":
            reason = "the engine is draining"
        elif silent_s > self._max_step_s:
            reason = f"no step was finished for {silent_s:.1f} s, and requests wait for one"
        return ServiceHealth(state, state != "dead", not reason, silent_s, reason)

    def metrics(self, model_name: str | None = None) -> EngineMetrics:
        """Returns the engine's metrics at this moment, as prometheus_client's servers take them.

        Args:
            model_name: their label; default: the name of the model's folder.

        Raises:
            ConfigError: prometheus_client is not installed.
        """
        if importlib.util.find_spec("prometheus_client") is None:
            text = "metrics need prometheus_client: install tpengine with its extra serve"
            raise errors.ConfigError(text)
        from tpengine.engine.prometheus import EngineMetrics

        name = model_name or Path(self.model_config.model).name
        return EngineMetrics(name, self.stats(), self.llm_engine.counters)

    def metrics_text(self, model_name: str | None = None) -> bytes:
        """Returns the same in Prometheus' text format."""
        metrics = self.metrics(model_name)
        from prometheus_client import generate_latest

        return generate_latest(metrics)

    engine = property(attrgetter("llm_engine"))

    async def drain(self, timeout_s: float) -> int:
        """Takes no new requests from now on, and waits until the present ones finish.

        Returns:
            Number of requests that were aborted because they had not finished by then. Their blocks
            are free unless the present step takes longer than two more seconds.
        """
        self._is_draining = True
        end = time.monotonic() + timeout_s
        while len(self._requests) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(0)  # a request whose last output is on its way finishes
        why = f"the engine ends, and gave its requests {timeout_s:.1f} s to finish"
        # A step that hangs must not prolong the drain.
        late, left_s = self._requests.all(), max(_CUT_OFF_S, end - time.monotonic())
        await self._requests.cut_off(why, left_s, *late)
        return len(late)

    async def shutdown(self, step_s: float = SHUTDOWN_S) -> None:
        """Ends the engine and its thread; requests that remain get `EngineDeadError`. A second call
        does nothing.

        Args:
            step_s: seconds that the present step may still take; the end of the ranks, which comes
                after it, may take thirty.

        Raises:
            EngineError: the step, or the end of the ranks, took longer; the thread hangs in it.
        """
        self._is_closed = True
        if self._loop is not None and self._loop.is_closed():
            self._requests.leave_loop()
        self._fail_all()
        self._texts.close()
        thread = self._thread
        await self._wait_until(lambda: thread.stop(0) or thread.ended, step_s, "a step")
        await self._wait_until(lambda: thread.stop(0), SHUTDOWN_S, "the end of its ranks")

    @staticmethod
    async def _wait_until(is_done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Polls, because one long `join` would block the loop."""
        start = time.monotonic()
        while not is_done():
            if time.monotonic() - start > limit_s:
                text = f"the engine's thread did not end within {limit_s:g} s: it hangs in {what}"
                raise errors.EngineError(text)
            await asyncio.sleep(_POLL_S)

    def _bind(self) -> None:
        """Makes the running loop the one that this engine belongs to.

        Raises:
            EngineError: another loop still has requests here.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._loop.is_closed() and len(self._requests):
                rule = "an engine belongs to one loop at a time: give each its own"
                text = f"requests of another event loop are being served; {rule}"
                raise errors.EngineError(text)
            self._requests.leave_loop()
            self._loop = loop
            self._thread.bind(loop, self._requests.receive, self._fail_all)

    def _tokenizer(self) -> Tokenizer:
        return need_tokenizer(self.llm_engine.tokenizer, self.model_config)

    def _check_open(self) -> None:
        if self._thread.ended or self._is_closed:
            raise self._death()
        if self._is_draining:
            text = "the engine is draining: it finishes what it has, and takes no new requests"
            raise errors.EngineDrainingError(f"{text}; ask another one")

    def _fail_all(self) -> None:
        """Finishes all requests, because the engine has ended."""
        self._requests.fail_all(self._death)

    def _death(self) -> errors.EngineDeadError:
        if self._thread.failure is None:
            return errors.EngineDeadError("the engine was shut down; make a new one")
        text = f"the engine has failed ({self._cause()}), and cannot go on; make a new one"
        error = errors.EngineDeadError(text)
        error.__cause__ = self._thread.failure
        return error

    def _cause(self) -> str:
        """Returns the error that ended the engine, in words; empty: no error did."""
        failure = self._thread.failure
        return "" if failure is None else f"{type(failure).__name__}: {failure}"

    def _state(self, group_state: str) -> str:
        """Returns the state as users see it."""
        if self._thread.ended or self._is_closed:
            return "dead"
        if self._is_draining and group_state != "dead":
            return "draining"
        return group_state
