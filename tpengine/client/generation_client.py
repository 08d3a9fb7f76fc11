"""`GenerationClient`: an asynchronous client of `tpengine serve`, with the types of the package."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar
from uuid import uuid4

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpengine import errors
from tpengine.client import client_messages as convert
from tpengine.client import grpc_channel
from tpengine.client.grpc_channel import ClientTLS, is_answer
from tpengine.inputs import PoolingParams
from tpengine.proto import RESUME_WINDOW_KEY, TIMEOUT_KEY, tpengine_pb2_grpc
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.status_details import has_details

Answer = TypeVar("Answer")
GRACE_S = 0.5
"""Time in seconds after a request's deadline for the server to report it."""
RESUME_WINDOW_S = 30.0
"""Seconds for which a client asks a server to keep a stream whose connection has broken."""
_LEAVE_S = 1.0


class GenerationClient:
    """One connection to a server. Every call has a deadline, and a frozen server is noticed.

    Use it in one event loop, with `async with` or `close`. It raises the errors that the engine
    raises in process, so that the same code serves both:

    - RequestError: the server refuses the request, or a value does not fit into the protocol; among
      them QueueFullError (retry after `retry_after_s`), DeadlineExceededError,
      DuplicateRequestError, RequestAbortedError, UnauthenticatedError.
    - ServerUnavailableError: there is no server, it does not answer, or it is ending.
    - ServerError: the server failed.

    Args:
        target: HOST:PORT.
        token: bearer token, if the server needs one: printable ASCII without spaces.
        tls: None: no encryption.
        timeout_s: default deadline in seconds of calls that generate; math.inf: none.
        call_timeout_s: deadline in seconds of all other calls; math.inf: none.
        keep_alive_s: time in seconds in which a silent server or network is noticed; open calls
            then end with ServerUnavailableError.

    Raises:
        ConfigError: a file cannot be read, the target is not of the form HOST:PORT, the token has
            other characters, or a time is not above 0.
    """

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: ClientTLS | None = None,
        timeout_s: float = 600.0,
        call_timeout_s: float = 10.0,
        keep_alive_s: float = 2.0,
    ) -> None:
        self.target = target
        self._timeout_s = grpc_channel.check_timeout("timeout_s", timeout_s)
        self._call_timeout_s = grpc_channel.check_timeout("call_timeout_s", call_timeout_s)
        self._metadata = grpc_channel.authorization(token)
        self._channel = grpc_channel.open_channel(target, tls, keep_alive_s)
        untyped_stub: Any = tpengine_pb2_grpc.GenerationServiceStub
        self._stub = untyped_stub(self._channel)
        self._outages: dict[str, Outage] = {}  # of the open streams, by request id
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self,
        prompt: convert.Prompt,
        params: convert.Sampling | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
        resume_window_s: float = RESUME_WINDOW_S,
    ) -> convert.RemoteOutput:
        """Completes one prompt and returns the whole output. Cancelling it aborts the request.

        Args:
            prompt: text, token ids, messages with `role` and `content`, or a dict with `prompt` or
                `prompt_token_ids`, and `multi_modal_data` for pictures, such as `{"image":
                [file.read_bytes()]}`. In messages a picture is a part `{"type": "image", "image":
                bytes}`.
            params: default: `SamplingParams()`; of a dict only its fields are sent, and for others
                the server takes the model's defaults.
            request_id: unique among the server's unfinished requests; default: made by the server.
            priority: lower is served first; needs a server with scheduling_policy "priority".
            timeout_s: deadline, in seconds from now; math.inf: none.
            max_queue_s: longest wait in seconds for the first step; math.inf: no limit.
            resume_window_s: see `stream`; the answer comes over a new call, and the request runs
                once.

        Raises:
            RequestError, ServerError: see the class.
        """
        own = convert.RequestFields(request_id, priority, max_queue_s)
        request = convert.to_request(prompt, params, own)
        responses = self._responses(self._stub.Generate, request, timeout_s, resume_window_s)
        (answer,) = [response async for response in responses]
        return convert.to_output(answer, prompt)

    async def stream(
        self,
        prompt: convert.Prompt,
        params: convert.Sampling | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
        resume_window_s: float = RESUME_WINDOW_S,
    ) -> AsyncIterator[convert.RemoteOutput]:
        """Completes one prompt and yields each new part; the last output is `finished` and has
        `usage`. Leaving the iterator aborts the request.

        If the connection breaks, and the server keeps streams (--resume-window), the stream goes on
        over a new call, and no part of it is lost or comes twice.

        Args:
            resume_window_s: longest time in seconds for which the server keeps the stream while the
                connection is broken, and this side tries again; 0: a broken connection ends it.
            others: see `generate`.

        Raises:
            NotKeptError: the server does not have the rest of the stream any more.
            RequestError, ServerError: see the class.
        """
        own = convert.RequestFields(request_id, priority, max_queue_s)
        request = convert.to_request(prompt, params, own)
        responses = self._responses(self._stub.GenerateStream, request, timeout_s, resume_window_s)
        async with aclosing(responses):
            async for response in responses:
                yield convert.to_output(response, prompt)

    async def embed(
        self,
        prompt: convert.Prompt,
        second: str | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> convert.RemoteEmbedding:
        """Gives the embedding of one prompt, its score with a second text, or the probabilities of
        classes, as the server's model does. Cancelling it aborts the request.

        Args:
            prompt, request_id, priority, timeout_s, max_queue_s: see `generate`.
            second: the second text of a pair, whose first is the prompt.
            pooling_params: default: `PoolingParams()`.

        Raises:
            RequestError, ServerError: see the class.
        """
        own = convert.RequestFields(request_id, priority, max_queue_s)
        request = convert.to_embed_request(prompt, second, pooling_params, own)
        call = self._stub.Embed(request, **self._until(timeout_s))
        async with typed_errors(call, self.target):
            return convert.to_embedding(await call, prompt)

    async def _responses(
        self, method: Any, request: pb.GenerateRequest, timeout_s: float | None, window_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The messages of a stream, or one whole answer; if the connection breaks, the rest comes
        over a new call.

        Args:
            window_s: see `stream`.
        """
        if window_s:
            own_id = request.request_id or f"stream-{uuid4().hex}"
            convert.put(request, errors.RequestError, resume_window_s=window_s, request_id=own_id)
        left_s = timeout_s = self._timeout_s if timeout_s is None else timeout_s
        begun, outage = time.monotonic(), Outage(window_s)
        async with self._aborting_if_left(request, outage):
            while True:
                call = outage.call = method(request, **self._until(left_s))
                is_stream = isinstance(call, grpc.aio.UnaryStreamCall)
                try:
                    async with typed_errors(call, self.target):
                        async for response in call if is_stream else _answer(call):
                            await outage.note_message()
                            if is_stream:
                                request.resume_from += _num_tokens(response)
                            yield response
                    return
                except errors.ServerUnavailableError as error:
                    pause_s = await outage.pause_s(error.__cause__)
                    left_s = timeout_s - (time.monotonic() - begun)
                    if pause_s is None or pause_s >= left_s:
                        raise
                finally:
                    call.cancel()  # no effect on a call that has ended
                await asyncio.sleep(pause_s)
                left_s -= pause_s

    @asynccontextmanager
    async def _aborting_if_left(
        self, request: pb.GenerateRequest, outage: Outage
    ) -> AsyncIterator[None]:
        """Aborts a stream that its reader leaves and that the server may keep."""
        self._outages[request.request_id] = outage
        try:
            yield
        except errors.TPEngineError:
            raise
        except BaseException:
            await outage.read_window()
            if outage.may_be_kept:
                await self._leave(request.request_id)
            raise
        finally:
            self._outages.pop(request.request_id, None)

    async def _leave(self, request_id: str) -> None:
        """Aborts a request. Without an answer in time, the server ends it after the window."""
        gone = pb.AbortRequest(request_id=request_id)
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):  # or the channel is closed
            await self._stub.Abort(gone, timeout=_LEAVE_S, metadata=self._metadata)

    async def abort(self, request_id: str) -> bool:
        """Ends a request; returns whether it existed. Another client's needs the admin token."""
        request = convert.put(pb.AbortRequest(), errors.InvalidPromptError, request_id=request_id)
        answer = await self._call(self._stub.Abort, request)
        return bool(answer.aborted)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        fields = {"text": text, "add_special_tokens": add_special_tokens}
        request = convert.put(pb.TokenizeRequest(), errors.InvalidPromptError, **fields)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def chat_token_ids(self, messages: Sequence[convert.Message]) -> list[int]:
        """The token ids of a conversation, by the model's chat template."""
        request = pb.TokenizeRequest(messages=convert.to_conversation(messages))
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        fields = {"token_ids": token_ids, "skip_special_tokens": skip_special_tokens}
        request = convert.put(pb.DetokenizeRequest(), errors.InvalidPromptError, **fields)
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """The model that is served."""
        return await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        """State, ranks, memory and limits."""
        return await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest())

    async def loads(self) -> pb.GetLoadsResponse:
        """Queues, cache and rates at this moment."""
        return await self._call(self._stub.GetLoads, pb.GetLoadsRequest())

    async def drain(self, timeout_s: float | None = None) -> int:
        """Makes the server finish its requests and end; needs the admin token.

        Args:
            timeout_s: time in seconds for that; at most, and by default, the server's own
                --drain-timeout.

        Returns:
            Number of calls that have not ended yet.
        """
        timeout_ms = None if timeout_s is None else convert.to_milliseconds("timeout_s", timeout_s)
        answer = await self._call(self._stub.Drain, pb.DrainRequest(timeout_ms=timeout_ms))
        return int(answer.num_open_calls)

    async def health(self, service: str = "") -> str:
        """SERVING, NOT_SERVING, or another status of `grpc.health.v1`.

        Raises:
            RequestError: the server does not know this service.
        """
        request = convert.put(health_pb2.HealthCheckRequest(), errors.RequestError, service=service)
        answer = await self._call(self._health.Check, request)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def close(self) -> None:
        """Ends the connection and aborts its requests."""
        kept = [name for name, outage in self._outages.items() if outage.may_be_kept]
        await asyncio.gather(*map(self._leave, kept))
        await self._channel.close()

    def _until(self, timeout_s: float | None) -> dict[str, Any]:
        """Options of a call with a deadline. The server ends the call; this side gives up a little
        later, so that the server's error, which names the request's phase, arrives."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        timeout_ms = convert.to_milliseconds("timeout_s", timeout_s)
        if timeout_ms is None:
            return {"metadata": self._metadata}
        timeout_ms = max(0, timeout_ms)
        metadata = (*self._metadata, (TIMEOUT_KEY, str(timeout_ms)))
        return {"timeout": timeout_ms / 1e3 + GRACE_S, "metadata": metadata}

    async def _call(self, method: Callable[..., Awaitable[Answer]], request: Any) -> Answer:
        timeout_ms = convert.to_milliseconds("call_timeout_s", self._call_timeout_s)
        timeout_s = None if timeout_ms is None else timeout_ms / 1e3
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        async with typed_errors(call, self.target):
            return await call

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _answer(call: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The answer of a call that has one."""
    yield await call


def _num_tokens(response: pb.GenerateResponse) -> int:
    return sum(len(output.token_ids) for output in response.outputs)


@asynccontextmanager
async def typed_errors(call: Any, target: str) -> AsyncIterator[None]:
    """Turns the errors of a call to this server into those of the engine."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise grpc_channel.to_error(error, target) from error
    except asyncio.CancelledError:
        # grpc.aio also raises it when the *server* ended the call with CANCELLED. If the call
        # ended otherwise, it is the caller's own cancellation, and must not be lost.
        cancelled = call.done() and await call.code() is grpc.StatusCode.CANCELLED
        if cancelled and has_details(await call.trailing_metadata()):
            raise errors.RequestAbortedError(f"{target}: {await call.details()}") from None
        raise


_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0
_NEVER_SENT = "failed to connect"
"""In gRPC's text for a call of which nothing has left this machine."""


class Outage:
    """The state of a stream's connection, over all its calls.

    Args:
        window_s: seconds that the client asks for.

    Attributes:
        call: the newest.
        granted_s: seconds that the server keeps the stream without a reader, 0: it does not; None:
            no answer has come.
    """

    def __init__(self, window_s: float) -> None:
        self.granted_s: float | None = None
        self._asked_s = window_s
        self.call: Any = None
        self._answered: Any = None
        self._broken_at: float | None = None
        self._num_failures = 0

    @property
    def may_be_kept(self) -> bool:
        """Whether the server may go on with the stream when its reader is gone."""
        return bool(self._asked_s) and self.granted_s != 0

    async def note_message(self) -> None:
        """The connection works: a message of the call has come."""
        if self._answered is not self.call:
            self._answered, self._broken_at, self._num_failures = self.call, None, 0
            await self.read_window()

    async def read_window(self) -> None:
        """Notes what the server has granted, if its answer to the call has begun. Called when the
        call has ended, or a message has come."""
        metadata = dict(await self.call.initial_metadata() or ())
        if metadata:
            self.granted_s = float(metadata.get(RESUME_WINDOW_KEY, 0))

    async def pause_s(self, error: BaseException | None) -> float | None:
        """Seconds after which the failed call is to be repeated; None: it is not.

        A request that may have arrived can be repeated, because its id finds its stream.

        Args:
            error: gRPC's.
        """
        if not isinstance(error, grpc.aio.AioRpcError) or is_answer(error):
            return None
        await self.read_window()
        window_s = self._asked_s if self.granted_s is None else self.granted_s
        now = time.monotonic()
        if self._broken_at is None:
            if self.granted_s is None and _NEVER_SENT in (error.details() or ""):
                return None
            self._broken_at = now
        pause_s = min(_FIRST_PAUSE_S * 2**self._num_failures, _MOST_PAUSE_S)
        pause_s *= random.uniform(0.5, 1)  # or all clients of a server come back at once
        self._num_failures += 1
        return pause_s if now + pause_s < self._broken_at + window_s else None
