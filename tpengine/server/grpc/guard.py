"""The guard in front of every method: authentication, the call's message, status of errors."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from tpengine import errors
from tpengine.proto import TIMEOUT_KEY
from tpengine.proto.status_details import write_details
from tpengine.server.auth import Authenticator, Call, Client, name_of
from tpengine.server.error_texts import text_for_client
from tpengine.server.grpc.wire import check_fields
from tpengine.server.limits import MAX_REQUEST_ID, UntrustedCalls, address_key, read_timeout
from tpengine.server.state import ServerState
from tpengine.server.stream_sender import write_within

_HEALTH = "/grpc.health.v1.Health/"


CALL: ContextVar[Call] = ContextVar("call")
"""The call that the current task serves."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of every service of the server.

    By itself grpc answers bytes that are not a message, and any exception of a method, with UNKNOWN
    and the exception's text. It also waits for a message without limit before it calls the method,
    and holds any number of such calls. Here a client is authenticated first, open calls are
    counted, a message must arrive within some seconds, it is read inside the method, and each error
    gets its status from `errors.STATUSES`.

    Args:
        authenticator: identifies the client.
        state: of the server; has the open calls and their limits.
    """

    def __init__(self, authenticator: Authenticator, state: ServerState) -> None:
        self._authenticator = authenticator
        self._state = state
        self._limits = state.limits
        self._untrusted = UntrustedCalls(state.limits)

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Returns the wrapped method; None for one that does not exist."""
        handler = await continuation(details)
        return None if handler is None else self._wrap(handler, details.method.startswith(_HEALTH))

    def _wrap(self, handler: Any, is_health: bool) -> Any:
        """The method as one that takes a stream of bytes: of those grpc reads no message itself."""

        async def unary(_: Any, context: Any) -> Any:
            async with self._enter(context, is_health) as call:
                call.message = self._read(handler, await self._receive(context, is_health))
                return await handler.unary_unary(call.message, context)

        async def stream(_: Any, context: Any) -> None:
            async with self._enter(context, is_health) as call:
                if handler.unary_stream is not None:
                    call.message = self._read(handler, await self._receive(context, is_health))
                    answers = handler.unary_stream(call.message, context)
                else:
                    answers = handler.stream_stream(self._receive_all(handler, context), context)
                if inspect.isawaitable(answers):  # the method writes its answers itself
                    await answers
                    return
                async with contextlib.aclosing(answers):
                    async for answer in answers:
                        await write_within(self._limits.write_s, context.write(answer))

        write = handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(unary, None, write)
        return grpc.stream_stream_rpc_method_handler(stream, None, write)

    @contextlib.asynccontextmanager
    async def _enter(self, context: Any, is_health: bool) -> AsyncIterator[Call]:
        """Authenticates and counts a call while it is served; an error ends it with its status. A
        call of health needs no token and no place: no other client can take it."""
        call = Call(f"req-{uuid.uuid4().hex}")
        place: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            if not is_health:
                call.client = identify_call(self._authenticator, context)
                place = self._state.calls.counted(
                    call.client.owner.account, context.add_done_callback
                )
            with place:
                call.deadline = _deadline(context)
                CALL.set(call)
                yield call
        except Exception as error:
            await _refuse(context, error, call)

    async def _receive_all(self, handler: Any, context: Any) -> AsyncIterator[Any]:
        """The messages of a call as they arrive.

        Raises:
            MalformedRequestError: the bytes are not a message, or none arrived for too long.
        """
        hint = "open a new call for the next one"
        while (data := await self._receive(context, False, hint)) is not grpc.aio.EOF:
            yield self._read(handler, data)

    async def _receive(
        self, context: Any, is_health: bool, hint: str = "send it with the call"
    ) -> Any:
        """The bytes of the next message of a call; EOF: there is none.

        Args:
            hint: what to do about a message that does not arrive.

        Raises:
            MalformedRequestError: it did not arrive in time.
        """
        limits = self._limits
        in_time: contextlib.AbstractAsyncContextManager[object] = asyncio.timeout(limits.message_s)
        why = f"no request message came within {limits.message_s:g} s"
        if is_health:
            in_time = self._untrusted.message_of(address_of(context))
            later = f"{limits.max_host_health_calls} later calls from your address"
            why = f"no request message came within {limits.health_message_s:g} s, or before {later}"
        try:
            async with in_time:
                return await context.read()
        except TimeoutError:
            raise errors.MalformedRequestError(f"{why}; {hint}") from None

    def _read(self, handler: Any, data: Any) -> Any:
        """Parses a message whose size and numbers of fields are within their bounds.

        Raises:
            MessageTooLargeError: it is too large.
            MalformedRequestError: there is none, it has too many fields, or is not the method's
                message.
        """
        if data is grpc.aio.EOF:
            text = "the call ended without its request message; send one"
            raise errors.MalformedRequestError(text)
        most = self._state.max_message_bytes
        if len(data) > most:
            limit = f"and may have at most {most} (--max-message-mib); send less"
            raise errors.MessageTooLargeError(f"the message has {len(data)} bytes, {limit}")
        read = handler.request_deserializer
        kind = getattr(getattr(read, "__self__", None), "DESCRIPTOR", None)
        if kind is not None:
            check_fields(data, kind, self._limits)
        try:
            return read(data)
        except DecodeError:
            # protobuf's text names Python classes, and no place in the bytes.
            raise errors.MalformedRequestError(
                f"these {len(data)} bytes are not the method's request message: cut short, with "
                "fields of other types, or with text that is no valid UTF-8"
            ) from None


def address_of(context: Any) -> str:
    """The `address_key` of the client that makes a call. gRPC's form of an address and a port is
    `ipv4:10.0.0.1:50000` or `ipv6:%5B::1%5D:50000`."""
    return address_key(unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]"))


def identify_call(authenticator: Authenticator, context: Any) -> Client:
    """The client that makes a call.

    Raises:
        UnauthenticatedError: as `Authenticator.identify`.
    """
    metadata = context.invocation_metadata() or ()
    headers = [str(value) for name, value in metadata if name == "authorization"]
    certificate = _certificate_name(context.auth_context())
    return authenticator.identify(headers, certificate, address_of(context))


def _certificate_name(peer: Mapping[str, Sequence[bytes]]) -> str | None:
    """The name in a certificate, from the properties that TLS has verified."""

    def texts(kind: str) -> list[str]:
        return [name.decode("utf-8", "replace") for name in peer.get(kind, ())]

    common, others = texts("x509_common_name"), texts("x509_subject_alternative_name")
    return name_of(common, others, b"".join(peer.get("x509_pem_cert", ())))


def _deadline(context: Any) -> float | None:
    """The deadline of a call: gRPC's, or that of the metadata if it is earlier.

    Raises:
        MalformedRequestError: that of the metadata is not a number.
    """
    remaining_s: float | None = context.time_remaining()
    named = dict(context.invocation_metadata() or ()).get(TIMEOUT_KEY)
    if named is not None:
        asked_s = read_timeout(str(named))
        remaining_s = asked_s if remaining_s is None else min(asked_s, remaining_s)
    return None if remaining_s is None else time.monotonic() + remaining_s


async def _refuse(context: Any, error: Exception, call: Call) -> NoReturn:
    """Ends a call with the status of an error."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # a write to a call that its client has left
        raise asyncio.CancelledError from error
    request_id = getattr(call.message, "request_id", "")[:MAX_REQUEST_ID] or call.request_id
    code = grpc.StatusCode[errors.status_of(type(error)).grpc]
    field = path_at_fault(error, call.message) if code is grpc.StatusCode.INVALID_ARGUMENT else None
    text = text_for_client(error, request_id, field)
    await context.abort(code, text, write_details(error, text, request_id, field))
    raise asyncio.CancelledError  # for the type checker: abort raises


def path_at_fault(error: Exception, message: Any) -> str | None:
    """The path in a client's message of the field that an error is about, as in `sampling.top_p`;
    None: it is about no single field.

    Args:
        message: None: it could not be read.
    """
    field: str | None = getattr(error, "field", None)
    if message is None:
        return field
    known, oneofs = message.DESCRIPTOR.fields_by_name, message.DESCRIPTOR.oneofs_by_name
    if isinstance(error, errors.InvalidSamplingParamsError):
        of_params = (name for name in ("sampling", "pooling", "sampling_params") if name in known)
        params = next(of_params, None)
        # vLLM has a field for each kind of constraint
        if params == "sampling_params" and field == "structured_outputs":
            field = message.sampling_params.WhichOneof("constraint")
        return params if params is None or field is None else f"{params}.{field}"
    if isinstance(error, errors.InvalidPictureError):
        for set_field, _ in message.ListFields():
            if set_field.name in ("images", "media_refs"):
                return str(set_field.name)
    # The engine names no field for a prompt as such, which has several forms.
    if isinstance(error, errors.InvalidPromptError) and field not in known:
        if "input" in oneofs:
            return message.WhichOneof("input") or "input"
        return "tokenized" if "tokenized" in known else field
    return field
