"""What stands before every method: who calls, whether the bytes are a message, what errors say."""

from __future__ import annotations

import asyncio
import inspect
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tpengine.errors import EngineError, MalformedRequestError, QueueFullError, RequestError
from tpengine.logger import init_logger
from tpengine.server.auth import Authenticator, Client
from tpengine.server.grpc.convert import Refusal, refusal
from tpengine.server.limits import MAX_REQUEST_ID, Limits

logger = init_logger(__name__)

_RETRY_AFTER_S = 1.0
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
    through the one table of status codes. grpc would also wait for a message before it asks who
    calls, without end, and hold as many calls meanwhile as anybody likes to open: here a stranger
    is refused first, open calls are counted, and a message has some seconds to come.

    Args:
        authenticator: tells who calls.
        limits: how many calls may be open, and for how long without a message.
    """

    def __init__(self, authenticator: Authenticator, limits: Limits) -> None:
        self._authenticator = authenticator
        self._message_s = limits.message_s
        self._max_open = {
            False: limits.max_calls + limits.queue.max_requests,
            True: limits.max_health_calls,
        }
        self._num_open = {False: 0, True: 0}
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
        """All as methods that take a stream, for grpc leaves the reading of those to them."""
        is_free = method.startswith(_FREE)
        write = _or_bytes(handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler, is_free), None, write)
        if handler.unary_stream is not None:
            stream = self._stream(handler, is_free)
        else:
            stream = self._both_ways(handler, is_free)
        return grpc.stream_stream_rpc_method_handler(stream, None, write)

    def _unary(self, handler: Any, is_free: bool) -> Callable[..., Any]:
        read = handler.request_deserializer

        async def unary(_: Any, context: Any) -> Any:
            told = _Told(f"req-{uuid.uuid4().hex}")
            try:
                with self._enter(context, told.request_id, is_free):
                    told.request = _read(read, await self._receive(context))
                    return await handler.unary_unary(told.request, context)
            except Exception as error:
                await _refuse(context, error, told)

        return unary

    def _stream(self, handler: Any, is_free: bool) -> Callable[..., Any]:
        read = handler.request_deserializer

        async def stream(_: Any, context: Any) -> None:
            told = _Told(f"req-{uuid.uuid4().hex}")
            try:
                with self._enter(context, told.request_id, is_free):
                    told.request = _read(read, await self._receive(context))
                    answers = handler.unary_stream(told.request, context)
                    if inspect.isawaitable(answers):
                        await answers
                        return
                    async with aclosing(answers):
                        async for answer in answers:
                            await context.write(answer)
            except Exception as error:
                await _refuse(context, error, told)

        return stream

    def _both_ways(self, handler: Any, is_free: bool) -> Callable[..., Any]:
        read = handler.request_deserializer

        async def both_ways(requests: AsyncIterator[bytes], context: Any) -> None:
            told = _Told(f"req-{uuid.uuid4().hex}")
            try:
                with self._enter(context, told.request_id, is_free):
                    messages = self._receive_all(requests, read)
                    async with aclosing(handler.stream_stream(messages, context)) as answers:
                        async for answer in answers:
                            await context.write(answer)
            except Exception as error:
                await _refuse(context, error, told)

        return both_ways

    @contextmanager
    def _enter(self, context: Any, request_id: str, is_free: bool) -> Iterator[None]:
        """Finds out who calls, for all that the current task does, and counts the call.

        Raises:
            UnauthenticatedError: nobody that the server knows.
            QueueFullError: too many calls are open.
        """
        client = None if is_free else self._authenticator.identify_call(context)
        if self._num_open[is_free] >= self._max_open[is_free]:
            raise QueueFullError(
                f"{self._num_open[is_free]} calls are open at this server, and no more may be; "
                "try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        CALL.set(Call(client, request_id))
        self._num_open[is_free] += 1
        try:
            yield
        finally:
            self._num_open[is_free] -= 1

    async def _receive_all(
        self, requests: AsyncIterator[bytes], read: Callable[[bytes], Any]
    ) -> AsyncIterator[Any]:
        """The call's messages as they come.

        Raises:
            MalformedRequestError: one is none, or the call's place was held for nothing.
        """
        incoming = aiter(requests)
        while True:
            try:
                data = await asyncio.wait_for(anext(incoming), self._message_s)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise MalformedRequestError(
                    f"no message came for {self._message_s:g} s; open a new call for the next one"
                ) from None
            yield _read(read, data)

    async def _receive(self, context: Any) -> bytes:
        """The call's one message.

        Raises:
            MalformedRequestError: none came.
        """
        try:
            data = await asyncio.wait_for(context.read(), self._message_s)
        except TimeoutError:
            raise MalformedRequestError(
                f"no request message came within {self._message_s:g} s; send it with the call"
            ) from None
        if data is grpc.aio.EOF:
            raise MalformedRequestError("the call ended without its request message; send one")
        return bytes(data)


@dataclass(slots=True)
class _Told:
    """What an error is to be told with.

    Attributes:
        request_id: made by the server.
        request: the message; None until it is understood.
    """

    request_id: str
    request: Any = None


def _or_bytes(write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """A serialiser that takes what has been serialised already, too."""

    def write_unless_bytes(message: Any) -> bytes:
        return message if isinstance(message, bytes) else write(message)

    return write_unless_bytes


def _read(read: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return read(data)
    except DecodeError:
        # protobuf does not say where; its words name Python's classes and are of no use to others.
        raise MalformedRequestError(
            f"these {len(data)} bytes are not the method's request message: cut short, with fields "
            "of other types, or with text that is no valid UTF-8"
        ) from None


async def _refuse(context: Any, error: Exception, call: _Told) -> NoReturn:
    """Ends the call with the status that the table gives."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # a write to a call that its client has left
        raise asyncio.CancelledError from error
    request_id = getattr(call.request, "request_id", "")[:MAX_REQUEST_ID] or call.request_id
    told = refusal(error, call.request, request_id)
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
