"""The methods of the service: each is a converter before and after the engine's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.async_engine.mailbox import Mailbox
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import (
    EngineDrainingError,
    EngineLoadingError,
    InvalidPromptError,
    ModelNotFoundError,
    PermissionDeniedError,
    RequestAbortedError,
)
from tpengine.sampling_params import RequestOutputKind
from tpengine.server.grpc import reports
from tpengine.server.grpc.call_deadline import remaining_s
from tpengine.server.grpc.convert import (
    read_conversation,
    read_generate_request,
)
from tpengine.server.grpc.guard import CALL
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.grpc.proto import tpengine_pb2_grpc
from tpengine.server.grpc.response import ResponseWriter
from tpengine.server.grpc.stream_sender import send_stream
from tpengine.server.limits import Limits, check_num_ids, check_request_id, check_text
from tpengine.server.state import ServerState

_DELTA, _FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class GenerationServicer(tpengine_pb2_grpc.GenerationServiceServicer):
    """Serves one engine. Errors are raised as they are; `Guard` tells them to the client.

    Args:
        state: of the server; the engine is there once it has left loading.
        limits: what a request may hold.
    """

    def __init__(self, state: ServerState, limits: Limits) -> None:
        self._state = state
        self._limits = limits

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        """One answer."""
        async with self._open(request, context, _FINAL) as mailbox:
            output = await mailbox.take()
            return await ResponseWriter().write(output)

    async def GenerateStream(self, request: Any, context: Any) -> None:  # noqa: N802
        """Answers as they come."""
        async with self._open(request, context, _DELTA) as mailbox:
            await send_stream(mailbox, context.write)

    @asynccontextmanager
    async def _open(
        self, message: pb.GenerateRequest, context: Any, kind: RequestOutputKind
    ) -> AsyncIterator[Mailbox]:
        engine = self._engine()
        if self._state.is_draining:
            raise EngineDrainingError("the server ends and takes no new requests; ask another")
        self._check_model(message)
        self._check_text(engine, message.WhichOneof("input"), message)
        max_model_len = engine.get_model_config().max_model_len
        request = read_generate_request(message, kind, self._limits, max_model_len)
        request = await self._complete(engine, request, message, context)
        await context.send_initial_metadata((("x-request-id", request.request_id),))
        with self._state.open_call():
            try:
                async with engine.open(request) as mailbox:
                    yield mailbox
            except RequestAbortedError:
                if self._state.is_draining:
                    raise EngineDrainingError(self._state.last_words) from None
                raise

    async def _complete(
        self,
        engine: AsyncLLMEngine,
        request: GenerateRequest,
        message: pb.GenerateRequest,
        context: Any,
    ) -> GenerateRequest:
        """Adds what the call knows: the id, who asks, and until when."""
        call = CALL.get()
        request_id = call.request_id
        if message.HasField("request_id"):
            check_request_id(message.request_id)
            request_id = message.request_id
        remaining = remaining_s(context)
        deadline = None if remaining is None else time.monotonic() + remaining
        chat = message.messages
        if request.messages is not None and not _adds_prompt(chat):
            # The engine's form of a request knows the usual ending of a conversation only.
            token_ids = await engine.chat_token_ids(request.messages, False)
            request = dataclasses.replace(request, messages=None, prompt_token_ids=token_ids)
        return dataclasses.replace(
            request,
            request_id=request_id,
            deadline=deadline,
            owner=None if call.client is None else call.client.name,
        )

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ends a request of the same client, or with the admin token anybody's."""
        engine = self._engine()
        check_request_id(request.request_id)
        client = CALL.get().client
        owner = engine.owner(request.request_id)
        if owner is not None and (client is None or client.name != owner):
            if client is None:
                raise PermissionDeniedError("Abort wants to know who asks")
            client.require_admin("to abort a request of another client")
        return pb.AbortResponse(aborted=await engine.abort(request.request_id))

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Text or a conversation as ids."""
        engine = self._engine()
        given = request.WhichOneof("input")
        self._check_text(engine, given, request)
        if given == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            token_ids = await engine.tokenize(request.text, special)
        elif given == "messages":
            messages = read_conversation(request.messages, self._limits)
            token_ids = await engine.chat_token_ids(messages, _adds_prompt(request.messages))
        else:
            raise InvalidPromptError("Tokenize needs text or messages; got neither")
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Ids as text."""
        engine = self._engine()
        check_num_ids(len(request.token_ids), engine.get_model_config().max_model_len)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await engine.detokenize(list(request.token_ids), skip))

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """What is served."""
        return reports.model_info(self._engine(), self._state.model)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The engine, its ranks and the limits; also while it is loaded."""
        return reports.server_info(self._state, self._limits)

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The moment."""
        return reports.loads(self._engine().stats(), self._state.num_open_calls)

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The same as SIGTERM."""
        client = CALL.get().client
        if client is None:
            raise PermissionDeniedError("Drain wants to know who asks")
        client.require_admin("Drain")
        timeout_s = None
        if request.HasField("timeout_ms"):
            if request.timeout_ms < 0:
                raise InvalidPromptError(f"timeout_ms must be at least 0, got {request.timeout_ms}")
            timeout_s = request.timeout_ms / 1e3
        self._state.ask_to_end("Drain", timeout_s)
        return pb.DrainResponse(num_open_calls=self._state.num_open_calls)

    def _engine(self) -> AsyncLLMEngine:
        if self._state.engine is None:
            raise EngineLoadingError(
                "the server loads its model; watch grpc.health.v1 under the name 'readiness'"
            )
        return self._state.engine

    def _check_text(self, engine: AsyncLLMEngine, given: str | None, message: Any) -> None:
        texts: list[str] = []
        if given in ("prompt", "text"):
            texts = [getattr(message, given)]
        elif given == "messages":
            texts = [text for one in message.messages.messages for text in (one.role, one.content)]
        max_model_len = engine.get_model_config().max_model_len
        check_text(given or "", texts, self._state.max_text_bytes, max_model_len)

    def _check_model(self, message: pb.GenerateRequest) -> None:
        if message.HasField("model") and message.model != self._state.model:
            raise ModelNotFoundError(
                f"model {message.model[:200]!r} is not served here, but {self._state.model!r} is; "
                "leave model out to take that"
            )


def _adds_prompt(conversation: pb.Conversation) -> bool:
    return conversation.add_generation_prompt or not conversation.HasField("add_generation_prompt")
