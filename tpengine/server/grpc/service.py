"""The methods of the service: each converts its message, calls the engine, and converts back.

The way of a token from rank 0 to a gRPC client that reads a stream, in order (paths in tpengine/):

On rank 0; without Ray this is the engine's thread of the server, and lines with [Ray] do not apply:
    worker/model_runner.py: `ModelRunner.execute` samples; its `append` makes the `StepOutput`.
        (On a GPU worker/gpu/run_ahead.py: `RunAhead.execute` calls `sample` and `append`.)
    [Ray] executor/rank.py: `Rank._step` encodes it by executor/codec.py: `encode`.
    [Ray] executor/rank.py: `Rank._serve` sends the bytes to the driver, over the steps' channel.
In the server's process, on the engine's thread:
    [Ray] executor/watch.py: `StepExchange.run` receives the answers of all ranks.
    [Ray] executor/group.py: `Group.step` returns rank 0's answer.
    [Ray] executor/launch/ray_executor.py: `RayExecutor.execute_model` decodes it by codec.py:
        `decode_output`. Without Ray executor/executor.py: `Executor.execute_model` returns it.
    engine/llm_engine.py: `LLMEngine._step` gets it from `_execute`, and makes the next three calls.
    engine/output_processor.py: `OutputProcessor.process` extends the text and decides stops.
    scheduling/scheduler.py: `Scheduler.update` appends the token to its sequence.
    engine/output_processor.py: `OutputProcessor.report` makes the `RequestOutput`.
    async_engine/engine_thread.py: `EngineThread._turn` gets it from `LLMEngine.step`.
    async_engine/engine_thread.py: `EngineThread._hand_over` passes all outputs of the step to the
        event loop in one call.
On the event loop:
    async_engine/request_table.py: `RequestTable.receive` finds the request's mailbox.
    async_engine/mailbox.py: `Mailbox.put` calls its listener; it merges what is not taken yet.
    server/grpc/service.py: `_TokenSender._on_output` is the listener; its `_send` takes the output.
    server/grpc/convert.py: `ResponseWriter.write_tokens` makes the message. An output with more
        than tokens (the last one, or log probabilities) is returned to `send_stream`, which uses
        `ResponseWriter.write`.
    grpc: `context.write` serializes and sends the message.
In the client:
    client/generation_client.py: `GenerationClient.stream` yields it.
    client/convert.py: `to_output` makes the `RemoteOutput` for that.

Streams are sent by `_TokenSender`, which drives the writes itself. With `await context.write()` in
its place `bench serve` takes 1.14 times the CPU time outside the engine per token if wake-ups are
not batched either, 1.03 times if they are (256 streams at once, medians of 5 pairs), and the output
rate at 24 requests/s falls to 0.89 (median of 7 pairs; the embedded model, two CPU cores that other
work shared, measured on 2026-11-22).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import tpengine
from tpengine.async_engine.mailbox import Mailbox
from tpengine.errors import InvalidPromptError
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import RequestOutputKind
from tpengine.server.grpc.convert import (
    ResponseWriter,
    adds_prompt,
    read_conversation,
    read_generate_request,
    read_seconds,
)
from tpengine.server.grpc.guard import CALL
from tpengine.server.grpc.proto import REQUEST_ID_KEY, tpengine_pb2_grpc
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.limits import Limits, check_num_ids, check_request_id
from tpengine.server.state import ServerState, State

Write = Callable[[pb.GenerateResponse], Coroutine[Any, Any, None]]
_DELTA, _FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
_STATES = {
    "running": pb.SERVER_STATE_RUNNING,
    "recovering": pb.SERVER_STATE_RECOVERING,
    "draining": pb.SERVER_STATE_DRAINING,
    "dead": pb.SERVER_STATE_DEAD,
}
_LEDGER_FIELDS = [field.name for field in pb.MemoryLedger.DESCRIPTOR.fields]


class GenerationServicer(tpengine_pb2_grpc.GenerationServiceServicer):
    """Serves one engine. The methods raise errors; `Guard` turns them into status codes.

    Args:
        state: of the server; has the engine once it is loaded.
        limits: bounds of a request.
    """

    def __init__(self, state: ServerState, limits: Limits) -> None:
        self._state = state
        self._limits = limits

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Completes one prompt; one answer."""
        async with self._open(request, context, _FINAL) as mailbox:
            return await ResponseWriter().write(await mailbox.take())

    async def GenerateStream(self, request: Any, context: Any) -> None:  # noqa: N802
        """Completes one prompt; each message has what is new."""
        async with self._open(request, context, _DELTA) as mailbox:
            await send_stream(mailbox, context.write)

    @asynccontextmanager
    async def _open(
        self, message: pb.GenerateRequest, context: Any, kind: RequestOutputKind
    ) -> AsyncIterator[Mailbox]:
        """Submits a request; its outputs arrive in the mailbox."""
        engine, call = self._state.loaded_engine(), CALL.get()
        self._state.check_open(message.model if message.HasField("model") else None)
        self._check_text(message)
        request_id = call.request_id
        if message.HasField("request_id"):
            check_request_id(message.request_id)
            request_id = message.request_id
        max_model_len = engine.model_config.max_model_len
        request = dataclasses.replace(
            read_generate_request(message, kind, self._limits, max_model_len, self._state.sampling),
            request_id=request_id,
            owner=call.client.name,
            deadline=call.deadline,
        )
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        async with self._state.open(request) as mailbox:
            yield mailbox

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends a request of the same client, or with the admin token of any client."""
        engine, client = self._state.loaded_engine(), CALL.get().client
        check_request_id(request.request_id)
        if engine.owner(request.request_id) not in (None, client.name):
            client.require_admin("to abort a request of another client")
        return pb.AbortResponse(aborted=await engine.abort(request.request_id))

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Converts a text or a conversation to token ids."""
        engine, given = self._state.loaded_engine(), request.WhichOneof("input")
        self._check_text(request)
        if given == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await engine.tokenize(request.text, special)
        elif given == "messages":
            messages = read_conversation(request.messages, self._limits)
            token_ids = await engine.chat_token_ids(messages, adds_prompt(request.messages))
        else:
            raise InvalidPromptError("Tokenize needs text or messages; got neither")
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Converts token ids to text."""
        engine = self._state.loaded_engine()
        check_num_ids(len(request.token_ids), engine.model_config.max_model_len)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await engine.detokenize(list(request.token_ids), skip))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The model and its properties."""
        engine = self._state.loaded_engine()
        model, tokenizer = engine.model_config, engine.llm_engine.get_tokenizer()
        return pb.GetModelInfoResponse(
            model=self._state.model,
            architecture=model.architecture,
            dtype=model.dtype,
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_layers=model.num_layers,
            end_token_ids=sorted(model.end_token_ids),
            has_tokenizer=tokenizer is not None,
            has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The engine, its ranks and the limits; while it loads, the limits only."""
        state = self._state
        message = pb.GetServerInfoResponse(
            version=tpengine.__version__,
            state=pb.SERVER_STATE_LOADING,
            uptime_s=state.uptime_s,
            limits=_write_limits(self._limits),
        )
        if state.state is State.DRAINING:
            message.state = pb.SERVER_STATE_DRAINING
        if state.engine is None:
            return message
        message.limits.max_logprobs = state.engine.llm_engine.get_model_config().max_logprobs
        stats = state.engine.stats()
        if state.state is State.RUNNING:
            message.state = _STATES[stats.state]
        message.epoch = stats.epoch
        message.recoveries = stats.recoveries
        message.block_size = stats.cache.block_size
        message.num_device_blocks = stats.cache.num_total_blocks
        message.num_host_blocks = min((one.num_host_blocks for one in stats.ledgers), default=0)
        # Not strict: another thread may replace the group of ranks at this moment.
        for rank, (device, node) in enumerate(zip(stats.devices, stats.nodes, strict=False)):
            message.ranks.add(rank=rank, device=device, node=node)
        for ledger in stats.ledgers:
            if ledger.rank < len(message.ranks):
                values = {name: getattr(ledger, name) for name in _LEDGER_FIELDS}
                message.ranks[ledger.rank].memory.CopyFrom(pb.MemoryLedger(**values))
        return message

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Queues, cache and rates at this moment, and resources of this process."""
        stats = self._state.loaded_engine().stats()
        cache = stats.cache
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pb.GetLoadsResponse(
            **dataclasses.asdict(stats.queues),
            num_total_blocks=cache.num_total_blocks,
            num_free_blocks=cache.num_free_blocks,
            cache_usage=cache.usage,
            num_prefix_queries=stats.prompt_tokens,
            num_prefix_hits=cache.prefix_hits,
            output_tokens_per_s=stats.output_tokens_per_s,
            num_preemptions=stats.num_preemptions,
            num_steps=stats.num_steps,
            num_open_calls=self._state.num_open_calls,
            num_tasks=len(asyncio.all_tasks()),
            num_threads=len(os.listdir("/proc/self/task")),
            num_file_descriptors=len(os.listdir("/proc/self/fd")),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends the server as SIGTERM does."""
        CALL.get().client.require_admin("Drain")
        timeout_s = None
        if request.HasField("timeout_ms"):
            timeout_s = read_seconds("timeout_ms", request.timeout_ms)
        self._state.ask_to_close("Drain", timeout_s)
        return pb.DrainResponse(num_open_calls=self._state.num_open_calls)

    def _check_text(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> None:
        given = message.WhichOneof("input")
        if given == "messages":
            texts = (text for one in message.messages.messages for text in (one.role, one.content))
            self._state.check_text(given, texts)
        elif given in ("prompt", "text"):
            self._state.check_text(given, [getattr(message, given)])


def _write_limits(limits: Limits) -> pb.ServerLimits:
    own = dataclasses.asdict(limits)
    return pb.ServerLimits(
        max_queued_requests=limits.queue.max_requests,
        max_queued_tokens=limits.queue.max_tokens,
        **{name: own[name] for name in pb.ServerLimits.DESCRIPTOR.fields_by_name if name in own},
    )


async def send_stream(mailbox: Mailbox, write: Write) -> None:
    """Sends the outputs of a request as they arrive, each in a message. Outputs that arrive while a
    message is being sent, because the client reads slowly, share the next one.

    Args:
        write: sends a message, which it serializes at once, and returns when there is room for
            another.

    Raises:
        Exception: the mailbox's error, or an error of `write`.
    """
    writer, finished = ResponseWriter(), False
    while not finished:
        with closing(_TokenSender(mailbox, writer, write)) as sender:
            output = await sender.send_tokens()
        await write(await writer.write(output))
        finished = output.finished


class _TokenSender:
    """Sends outputs that have only tokens in the call that puts them into the mailbox.

    The task of the stream sleeps meanwhile: this object drives the coroutine of each write itself.
    After a step all streams are written in one turn of the event loop; a task per stream would take
    two turns each, and in each the engine's thread may take the interpreter's lock. The gain is at
    the head of this file.

    A write has usually ended when the next output arrives. If it has not, the future that it awaits
    tells when it has.
    """

    def __init__(self, mailbox: Mailbox, writer: ResponseWriter, write: Write) -> None:
        self._mailbox = mailbox
        self._writer = writer
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None
        self._written: asyncio.Future[Any] | None = None
        self._end: asyncio.Future[RequestOutput | BaseException]
        self._end = asyncio.get_running_loop().create_future()

    async def send_tokens(self) -> RequestOutput:
        """Sends outputs while they have only new tokens, as `ResponseWriter.write_tokens` decides;
        then returns the first one that has more, which is not sent."""
        self._listen()
        end = await self._end
        if isinstance(end, BaseException):
            raise end
        return end

    def close(self) -> None:
        """Stops listening to the mailbox, and gives up a write that has not ended."""
        self._mailbox.listener = None
        self._end.cancel()
        if self._written is not None:  # gRPC fails it when the call is gone; mark that as seen
            self._written.add_done_callback(lambda one: one.cancelled() or one.exception())
        if self._writing is not None:
            self._writing.close()

    def _listen(self, _written: object = None) -> None:
        """Listens to the mailbox, and sends what is in it. Also the callback of `_written`, which
        passes that future; it is not needed here."""
        if not self._end.done():
            self._mailbox.listener = self._on_output
            self._on_output()

    def _on_output(self) -> None:
        end: RequestOutput | BaseException | None
        try:
            end = self._send()
        except (Exception, asyncio.CancelledError) as error:
            end = error  # for the stream's task, not for the caller, which serves all streams
        if end is not None:
            self._mailbox.listener = None
            if not self._end.done():  # it is if the stream's task was cancelled
                self._end.set_result(end)

    def _send(self) -> RequestOutput | None:
        """Sends what is in the mailbox if the last write has ended; returns it if it has more than
        tokens."""
        while self._writing is not None:
            if self._written is not None and not self._written.done():
                self._mailbox.listener = None
                self._written.add_done_callback(self._listen)
                return None
            self._advance()
        output = self._mailbox.take_now()
        if output is None:
            return None
        message = self._writer.write_tokens(output)
        if message is None:
            return output
        self._writing = self._write(message)
        self._advance()
        return None

    def _advance(self) -> None:
        """Runs the write until it awaits something, or ends."""
        assert self._writing is not None
        try:
            self._written = self._writing.send(None)
        except StopIteration:
            self._writing = self._written = None
