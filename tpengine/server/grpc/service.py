"""The methods of the service: each converts its message, calls the engine, and converts back.

The way of a token from rank 0 to a gRPC client that reads a stream, in order (paths in tpengine/):

On rank 0; where the server's process is the only rank, this is its engine's thread, and lines with
[group] do not apply:
    worker/model_runner.py: `ModelRunner.execute` samples; its `finish` makes the `StepOutput`.
    [group] executor/rank.py: `Rank._answer_steps` encodes it by executor/codec.py: `encode`.
    [group] executor/rank.py: `Rank.serve` sends the bytes to the driver, over the steps' channel.
In the server's process, on the engine's thread:
    [group] executor/watch.py: `Exchange.take_answers` receives the answers of all ranks.
    [group] executor/group.py: `Group.take_answer` returns rank 0's answer.
    [group] executor/group_executor.py: `GroupExecutor.take_answer` decodes it by codec.py:
        `decode_output`. Alone executor/executor.py: `Executor.take_answer` returns it.
    engine/llm_engine.py: `LLMEngine._step` gets it, and makes the next three calls.
    engine/output_processor.py: `OutputProcessor.process` extends the text and decides stops.
    scheduling/scheduler.py: `Scheduler.update` appends the token to its sequence.
    engine/output_processor.py: `OutputProcessor.report` makes the `RequestOutput`.
    async_engine/engine_thread.py: `EngineThread._turn` gets it from `LLMEngine.step`.
    async_engine/engine_thread.py: `EngineThread._call_in_loop` passes all outputs of the step to
        the event loop in one call.
On the event loop:
    async_engine/request_table.py: `RequestTable.receive` finds the request's mailbox.
    async_engine/mailbox.py: `Mailbox.put` calls its listener; it merges what is not taken yet.
    server/stream_sender.py: `_TokenSender._on_output` is the listener; its `_send` takes the
        output.
    server/grpc/generation_messages.py: `ResponseWriter.write_tokens` makes the message. An output
        with more than tokens (the last one, or log probabilities) is returned to `send_stream`,
        which uses `ResponseWriter.write`.
    grpc: `context.write` serializes and sends the message. (Of a stream that can be resumed,
        `_produce` adds it to server/kept_streams.py, whose `KeptStream.send` writes it.)
    (A gateway's stream takes the same way from server/grpc/vllm.py, with `VllmWriter`.)
In the client:
    client/generation_client.py: `GenerationClient.stream` yields it.
    client/client_messages.py: `to_output` makes the `RemoteOutput` for that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import tpengine
from tpengine.async_engine.mailbox import Mailbox
from tpengine.async_engine.request_table import unique_id
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import InvalidPromptError, RequestAbortedError
from tpengine.host import own_memory_bytes
from tpengine.inputs import LoRARequest
from tpengine.proto import REQUEST_ID_KEY, RESUME_WINDOW_KEY, tpengine_pb2_grpc
from tpengine.proto import tpengine_pb2 as pb
from tpengine.sampling_params import RequestOutputKind as Kind
from tpengine.server.auth import Call
from tpengine.server.grpc import generation_messages as convert
from tpengine.server.grpc.generation_messages import ResponseWriter
from tpengine.server.grpc.guard import CALL
from tpengine.server.kept_streams import KeptStream, Resumption
from tpengine.server.limits import check_num_ids, check_request_id
from tpengine.server.state import ServerState, State
from tpengine.server.stream_sender import Write, send_stream

Message = pb.GenerateRequest
_MODEL_FIELDS = ("architecture", "dtype", "quantization", "max_model_len", "vocab_size")
_LEDGER_FIELDS = [field.name for field in pb.MemoryLedger.DESCRIPTOR.fields]


class GenerationServicer(tpengine_pb2_grpc.GenerationServiceServicer):
    """Serves one engine. The methods raise errors; `Guard` turns them into status codes.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Completes one prompt; one answer."""
        if request.HasField("resume_from"):
            text = "is for GenerateStream; leave it out, or stream"
            raise InvalidPromptError.of_field("resume_from", text)
        answers: list[Any] = []

        async def take(answer: pb.GenerateResponse) -> None:
            answers.append(answer)

        await self._serve(request, context, Kind.FINAL_ONLY, take)
        return answers[-1]

    async def GenerateStream(self, request: Any, context: Any) -> None:  # noqa: N802
        """Completes one prompt; each message has what is new."""
        await self._serve(request, context, Kind.DELTA, context.write)

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Serves one prompt, or a pair, of a model that makes no tokens."""
        adapter = self._check(request, request.pooling.HasField("truncate_prompt_tokens"))
        if request.HasField("second"):
            self._state.check_text("second", [request.second])
        asked = convert.read_embed_request(request, self._state.limits)
        asked = dataclasses.replace(asked, lora_request=adapter)
        request_id = request.request_id if request.HasField("request_id") else None
        async with open_request(self._state, context, asked, request_id) as mailbox:
            return convert.write_embed_response(await mailbox.take())

    async def _serve(self, message: Message, context: Any, kind: Kind, write: Write[Any]) -> None:
        """Serves a request, or sends what its client does not have of a kept stream."""
        kept, account = self._state.kept, CALL.get().client.owner.account
        asked = convert.read_resumption(message, account, kept, kind)
        if asked is not None and await self._send_kept(message, context, asked, kind, write):
            return
        request = self._read(message, kind)
        request_id = message.request_id if message.HasField("request_id") else None
        async with open_request(self._state, context, request, request_id) as mailbox:
            await send_stream(mailbox, ResponseWriter(), write, self._state.limits.write_s)

    async def _send_kept(
        self, message: Message, context: Any, asked: Resumption, kind: Kind, write: Write[Any]
    ) -> bool:
        """Begins or finds a kept stream, and sends what its client does not have; returns whether
        there was room to keep it."""
        stream = self._state.kept.find(asked)
        if stream is None:
            own_id = message.request_id
            request = _of_call(self._read(message, kind), CALL.get(), unique_id(own_id))
            stream = self._state.kept.open(asked, own_id, partial(self._produce, request))
        if stream is None:
            return False
        window_s = f"{stream.asked.window_s:g}"
        metadata = ((REQUEST_ID_KEY, stream.request_id), (RESUME_WINDOW_KEY, window_s))
        await context.send_initial_metadata(metadata)

        async def send(response: bytes) -> None:
            await write(pb.GenerateResponse.FromString(response))

        await stream.send(asked.after, send)
        return True

    async def _produce(self, request: GenerateRequest, stream: KeptStream) -> None:
        """Serves the request of a kept stream. Its position is the number of output tokens."""

        async def keep(message: pb.GenerateResponse) -> None:
            num_tokens = sum(len(output.token_ids) for output in message.outputs)
            message.request_id = stream.request_id
            stream.add(message.SerializeToString(), stream.position + num_tokens)

        async with self._state.open(request) as mailbox:
            await send_stream(mailbox, ResponseWriter(), keep, self._state.limits.write_s)

    def _read(self, message: Message, kind: Kind) -> GenerateRequest:
        """The engine's form of a message, without what belongs to the call."""
        engine = self._state.loaded_engine()
        adapter = self._check(message, message.sampling.HasField("truncate_prompt_tokens"))
        limits = self._state.limits, engine.model_config.max_model_len
        request = convert.read_generate_request(message, kind, *limits, self._state.sampling)
        return dataclasses.replace(request, lora_request=adapter)

    def _check(self, message: Message | pb.EmbedRequest, is_cut: bool) -> LoRARequest | None:
        """Checks that a request is taken, before its prompt is read; returns its adapter."""
        self._state.loaded_engine()
        adapter = self._state.check_open(message.model if message.HasField("model") else None)
        self._check_text(message)
        if not is_cut:
            self._state.check_num_tokens(len(message.prompt_token_ids.ids))
        return adapter

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends a request of the same client, or with the admin token of any client."""
        return pb.AbortResponse(aborted=await abort_requests(self._state, [request.request_id]))

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Converts a text or a conversation to token ids."""
        engine, field = self._state.loaded_engine(), request.WhichOneof("input")
        self._check_text(request)
        if field == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await engine.tokenize(request.text, special)
        elif field == "messages":
            messages = convert.read_conversation(request.messages, self._state.limits)
            token_ids = await engine.chat_token_ids(messages, convert.adds_prompt(request.messages))
        else:
            raise InvalidPromptError("Tokenize needs text or messages; got neither")
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Converts token ids to text."""
        engine = self._state.loaded_engine()
        check_num_ids("token_ids", len(request.token_ids), engine.model_config.max_model_len)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await engine.detokenize(list(request.token_ids), skip))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The model and its properties."""
        engine = self._state.loaded_engine()
        model, tokenizer = engine.model_config, engine.llm_engine.get_tokenizer()
        pictures = (await engine.get_scheduler_config()).pictures
        return pb.GetModelInfoResponse(
            **{name: getattr(model, name) for name in _MODEL_FIELDS},
            model=self._state.model,
            num_layers=model.num_layers,
            end_token_ids=sorted(model.end_token_ids),
            has_tokenizer=tokenizer is not None,
            has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
            max_images=0 if pictures is None else pictures.max_per_prompt,
            task=model.task,
            num_outputs=model.num_outputs,
            labels=() if model.pooling is None else model.pooling.labels,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The engine, its ranks and the limits; while it loads, the limits only."""
        state = self._state
        message = pb.GetServerInfoResponse(version=tpengine.__version__, uptime_s=state.uptime_s)
        message.state = _state(state.state.value)
        message.limits.CopyFrom(_write_limits(state))
        if state.engine is None:
            return message
        model = state.engine.llm_engine.get_model_config()
        message.limits.max_logprobs = model.max_logprobs
        message.limits.max_model_len = model.max_model_len
        stats = state.engine.stats()
        if state.state is State.RUNNING:
            message.state = _state(stats.state)
        message.epoch = stats.epoch
        message.recoveries = stats.recoveries
        message.block_size = stats.cache.block_size
        message.num_device_blocks = stats.cache.num_total_blocks
        message.num_host_blocks = min((entry.num_host_blocks for entry in stats.ledgers), default=0)
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
            num_kept_streams=len(self._state.kept),
            num_kept_bytes=self._state.kept.num_bytes,
            num_open_calls=self._state.num_open_calls,
            num_tasks=len(asyncio.all_tasks()),
            num_threads=len(os.listdir("/proc/self/task")),
            num_file_descriptors=len(os.listdir("/proc/self/fd")),
            resident_bytes=own_memory_bytes()[1],
        )

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends the server as SIGTERM does."""
        CALL.get().client.require_admin("Drain")
        timeout_s = None
        if request.HasField("timeout_ms"):
            timeout_s = convert.read_seconds("timeout_ms", request.timeout_ms)
        self._state.ask_to_close("Drain", timeout_s)
        return pb.DrainResponse(num_open_calls=self._state.num_open_calls)

    def _check_text(self, message: Message | pb.EmbedRequest | pb.TokenizeRequest) -> None:
        field = message.WhichOneof("input")
        if field == "messages":
            turns = message.messages.messages
            texts = (
                text for m in turns for text in (m.role, m.content, *(p.text for p in m.parts))
            )
            self._state.check_text(field, texts)
        elif field in ("prompt", "text"):
            self._state.check_text(field, [getattr(message, field)])


@asynccontextmanager
async def open_request(
    state: ServerState, context: Any, request: GenerateRequest, request_id: str | None
) -> AsyncIterator[Mailbox]:
    """Submits a request of the current call; its outputs arrive in the mailbox.

    Args:
        request_id: the client's choice; None: the call's.

    Raises:
        RequestError, EngineError: see `ServerState.open`.
    """
    call = CALL.get()
    if request_id is not None:
        check_request_id(request_id)
    named = _of_call(request, call, request_id or call.request_id)
    await context.send_initial_metadata(((REQUEST_ID_KEY, named.request_id),))
    async with state.open(named) as mailbox:
        yield mailbox


def _of_call(request: GenerateRequest, call: Call, request_id: str) -> GenerateRequest:
    owner, deadline = call.client.owner, call.deadline
    return dataclasses.replace(request, request_id=request_id, owner=owner, deadline=deadline)


async def abort_requests(state: ServerState, request_ids: Sequence[str]) -> bool:
    """Aborts those requests that the current call's client has sent, or with the admin token any
    client; returns whether there was one.

    Raises:
        InvalidPromptError: an id is none.
        PermissionDeniedError: other clients have sent all of them.
    """
    engine, client = state.loaded_engine(), CALL.get().client
    for request_id in request_ids:
        check_request_id(request_id)
    kept = [stream for name in request_ids for stream in state.kept.of_request(client, name)]
    owners = engine.owners(set(request_ids))  # several clients may use one id
    own = {i for i, owner in owners.items() if owner in ("", client.owner.name)}
    if owners and not own and not kept:
        client.require_admin("to abort a request of another client")
    engine_ids = set(owners) if client.is_admin else own
    for stream in kept:
        stream.end(RequestAbortedError(f"request {stream.request_id!r} was aborted"))
        state.kept.drop(stream)  # also if it had ended before
    return any(await asyncio.gather(*map(engine.abort, engine_ids))) or bool(kept)


def _state(name: str) -> Any:
    return pb.ServerState.Value(f"SERVER_STATE_{name.upper()}")


def _write_limits(state: ServerState) -> pb.ServerLimits:
    limits = state.limits
    own = dataclasses.asdict(limits) | {"max_message_bytes": state.max_message_bytes}
    return pb.ServerLimits(
        max_open_calls=limits.places,
        max_queued_requests=limits.queue.max_requests,
        max_queued_tokens=limits.queue.max_tokens,
        **{name: own[name] for name in pb.ServerLimits.DESCRIPTOR.fields_by_name if name in own},
    )
