"""What stands before every method: who calls, whether the bytes are a message, what errors say."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tpengine.errors import EngineError, MalformedRequestError, RequestError
from tpengine.logger import init_logger
from tpengine.server.auth import Authenticator, Client
from tpengine.server.convert import Refusal, refusal
from tpengine.server.limits import MAX_REQUEST_ID

logger = init_logger(__name__)

_FREE = "/grpc.health.v1.Health/"
_STATUS_DETAILS = "grpc-status-details-bin"
"""Where gRPC's richer error model has its `google.rpc.Status`."""


@dataclass(frozen=True, slots=True)
class Call:
    """The call that the current task serves.

    Attributes:
        client: who calls; None: it may be anybody.
        request_id: made by the server, for requests that bring none and for the log.
    """

    client: Client | None
    request_id: str


CALL: ContextVar[Call] = ContextVar("call")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of every service on the server.

    grpc's own ways would answer UNKNOWN, with the exception's text, to bytes that are no message
    and to whatever a method raises. Here messages are read inside the method, and each error goes
    through the one table of status codes.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Returns the wrapped method; None for one that does not exist."""
        if details.method in self._wrapped:
            return self._wrapped[details.method]
        handler = await continuation(details)
        if handler is None:
            return None
        self._wrapped[details.method] = self._wrap(details.method, handler)
        return self._wrapped[details.method]

    def _wrap(self, method: str, handler: Any) -> Any:
        is_free = method.startswith(_FREE)
        read, write = handler.request_deserializer, handler.response_serializer

        async def unary(data: bytes, context: Any) -> Any:
            request = None
            call = Call(None, f"req-{uuid.uuid4().hex}")
            try:
                call = self._enter(context, call, is_free)
                request = _read(read, data)
                return await handler.unary_unary(request, context)
            except Exception as error:
                await _refuse(context, error, request, call)

        async def stream(data: bytes, context: Any) -> None:
            request = None
            call = Call(None, f"req-{uuid.uuid4().hex}")
            try:
                call = self._enter(context, call, is_free)
                request = _read(read, data)
                async with aclosing(handler.unary_stream(request, context)) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                await _refuse(context, error, request, call)

        async def both_ways(requests: AsyncIterator[bytes], context: Any) -> None:
            call = Call(None, f"req-{uuid.uuid4().hex}")
            try:
                call = self._enter(context, call, is_free)
                messages = (_read(read, data) async for data in requests)
                async with aclosing(handler.stream_stream(messages, context)) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except Exception as error:
                await _refuse(context, error, None, call)

        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(unary, None, write)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(stream, None, write)
        return grpc.stream_stream_rpc_method_handler(both_ways, None, write)

    def _enter(self, context: Any, call: Call, is_free: bool) -> Call:
        """Finds out who calls, for all that the current task does from here on."""
        if not is_free:
            metadata = context.invocation_metadata() or ()
            headers = [str(value) for name, value in metadata if name == "authorization"]
            names = context.auth_context().get("x509_common_name", ())
            certificate = names[0].decode("utf-8", "replace") if names else None
            call = Call(self._authenticator.identify(headers, certificate), call.request_id)
        CALL.set(call)
        return call


def _read(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        # protobuf does not say where; its words name Python's classes and are of no use to others.
        raise MalformedRequestError(
            f"these {len(data)} bytes are not the method's request message: cut short, with fields "
            "of other types, or with text that is no valid UTF-8"
        ) from None


async def _refuse(context: Any, error: Exception, request: Any, call: Call) -> NoReturn:
    """Ends the call with the status that the table gives."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    request_id = getattr(request, "request_id", "")[:MAX_REQUEST_ID] or call.request_id
    told = refusal(error, request, request_id)
    if told.code is grpc.StatusCode.INTERNAL:
        _log(error, request_id)
    await context.abort(told.code, told.text, _trailers(told, request_id))
    raise asyncio.CancelledError  # for the type checker: abort raises


def _trailers(told: Refusal, request_id: str) -> tuple[tuple[str, bytes], ...]:
    """gRPC's richer error model: the same in a form for programs."""
    status = Status(code=told.code.value[0], message=told.text)
    status.details.add().Pack(RequestInfo(request_id=request_id))
    if told.field is not None:
        violation = BadRequest.FieldViolation(field=told.field, description=told.text)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if told.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(told.retry_after_s * 1e9))
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return ((_STATUS_DETAILS, status.SerializeToString()),)


def _log(error: Exception, request_id: str) -> None:
    """Notes a fault of ours. Foreign exceptions may quote a prompt: only where they came from."""
    own = isinstance(error, (EngineError, RequestError))
    frames = "".join(traceback.format_tb(error.__traceback__))
    text = str(error) if own else "(its text may hold a prompt; see it with level DEBUG)"
    logger.error("request %r: %s: %s\n%s", request_id, type(error).__name__, text, frames.rstrip())
    logger.debug("request %r: %s", request_id, error)
