"""`GenerationClient`: an asynchronous client of `tpengine serve` with the package's own types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpengine.client.channel import (
    ClientTLS,
    authorization,
    check_timeout,
    open_channel,
)
from tpengine.client.convert import (
    Message,
    Prompt,
    RemoteOutput,
    put,
    to_conversation,
    to_milliseconds,
    to_output,
    to_request,
)
from tpengine.client.errors import to_error
from tpengine.errors import InvalidPromptError, RequestAbortedError, RequestError
from tpengine.sampling_params import SamplingParams
from tpengine.server.grpc.call_deadline import TIMEOUT_KEY
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.grpc.proto import tpengine_pb2_grpc

__all__ = ["ClientTLS", "GenerationClient"]

_GRACE_S = 0.5
"""What a server gets, after a request's deadline, to say that it has passed."""
_LOCALLY_CANCELLED = "Locally cancelled by application!"


class GenerationClient:
    """One connection to a server; calls have deadlines, and a server that freezes is noticed.

    To be used in one event loop, with `async with` or `close`. Errors are those that the engine
    raises in process, so that code is the same near and far:

    - RequestError: the server refuses the request, or a value of it cannot go over the wire; among
      them QueueFullError (come back after `retry_after_s`), DeadlineExceededError,
      DuplicateRequestError, RequestAbortedError, UnauthenticatedError.
    - ServerUnavailableError: the server is not there, does not answer, or is ending.
    - ServerError: the server failed by itself.

    Args:
        target: HOST:PORT.
        token: bearer token, if the server wants one: printable ASCII without spaces.
        tls: None: no encryption.
        timeout_s: deadline of calls that generate, unless they name their own; math.inf: none.
        call_timeout_s: deadline of all other calls; math.inf: none.
        keep_alive_s: within this time a server, or a network, that has gone silent is noticed;
            open calls then end with ServerUnavailableError.

    Raises:
        ConfigError: a file cannot be read, the target is not of the form HOST:PORT, the token
            cannot be one, or a time is not above 0.
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
        self._timeout_s = check_timeout("timeout_s", timeout_s)
        self._call_timeout_s = check_timeout("call_timeout_s", call_timeout_s)
        self._metadata = authorization(token)
        self._channel = open_channel(target, tls, keep_alive_s)
        untyped_stub: Any = tpengine_pb2_grpc.GenerationServiceStub
        self._stub = untyped_stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> RemoteOutput:
        """Completes one prompt and returns when all is there. Cancelling it aborts the request.

        Args:
            prompt: text, token ids, messages with `role` and `content`, or a dict with `prompt` or
                `prompt_token_ids`.
            params: default: `SamplingParams()`.
            request_id: unique among the server's unfinished requests; default: the server's choice.
            priority: lower is served first; needs a server with scheduling_policy "priority".
            timeout_s: deadline, in seconds from now; math.inf: none.
            max_queue_s: longest wait for the first step; math.inf: any.

        Raises:
            RequestError, ServerError: see the class.
        """
        request = to_request(prompt, params or SamplingParams(), request_id, priority, max_queue_s)
        call = self._stub.Generate(request, **self._until(timeout_s))
        async with self._typed_errors(call):
            return to_output(await call, prompt)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> AsyncIterator[RemoteOutput]:
        """Completes one prompt and yields what is new as it comes; the last output is `finished`
        and has `usage`. Leaving the iterator aborts the request.

        Args:
            see `generate`.

        Raises:
            RequestError, ServerError: see the class.
        """
        request = to_request(prompt, params or SamplingParams(), request_id, priority, max_queue_s)
        call = self._stub.GenerateStream(request, **self._until(timeout_s))
        try:
            async with self._typed_errors(call):
                async for response in call:
                    yield to_output(response, prompt)
        finally:
            call.cancel()  # does nothing to one that has ended

    async def abort(self, request_id: str) -> bool:
        """Ends a request; returns whether there was one. Somebody else's wants the admin token."""
        request = pb.AbortRequest()
        put(request, InvalidPromptError, request_id=request_id)
        answer = await self._call(self._stub.Abort, request)
        return bool(answer.aborted)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        request = pb.TokenizeRequest()
        put(request, InvalidPromptError, text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as the ids of a prompt, by the model's chat template."""
        request = pb.TokenizeRequest(messages=to_conversation(messages))
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        request = pb.DetokenizeRequest()
        put(
            request,
            InvalidPromptError,
            token_ids=token_ids,
            skip_special_tokens=skip_special_tokens,
        )
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        answer: pb.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo, pb.GetModelInfoRequest()
        )
        return answer

    async def server_info(self) -> pb.GetServerInfoResponse:
        """State, ranks, memory and limits."""
        answer: pb.GetServerInfoResponse = await self._call(
            self._stub.GetServerInfo, pb.GetServerInfoRequest()
        )
        return answer

    async def loads(self) -> pb.GetLoadsResponse:
        """Queues, cache and rates of this moment."""
        answer: pb.GetLoadsResponse = await self._call(self._stub.GetLoads, pb.GetLoadsRequest())
        return answer

    async def drain(self, timeout_s: float | None = None) -> int:
        """Has the server finish what it has, and end; wants the admin token.

        Args:
            timeout_s: how long that may take; None or math.inf: as long as the server was started
                with, which is also the longest.

        Returns:
            Calls that have not ended yet.
        """
        timeout_ms = None if timeout_s is None else to_milliseconds("timeout_s", timeout_s)
        answer = await self._call(self._stub.Drain, pb.DrainRequest(timeout_ms=timeout_ms))
        return int(answer.num_open_calls)

    async def health(self, service: str = "") -> str:
        """SERVING or NOT_SERVING, or another name of `grpc.health.v1`'s.

        Raises:
            RequestError: the server knows no such service.
        """
        request = _health_request(service)
        answer = await self._call(self._health.Check, request)
        return _health_name(answer.status)

    async def watch_health(self, service: str = "") -> AsyncIterator[str]:
        """The health of now, and then each change of it; without an end of its own."""
        request = _health_request(service)
        call = self._health.Watch(request, metadata=self._metadata)
        try:
            async with self._typed_errors(call):
                async for answer in call:
                    yield _health_name(answer.status)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the connection; what runs on it is aborted."""
        await self._channel.close()

    def _until(self, timeout_s: float | None) -> dict[str, Any]:
        """Options of a call that the server is to end in time. This side gives up a little later,
        so that the server's words on how far the request had come are the ones that are read."""
        timeout_ms = to_milliseconds(
            "timeout_s", self._timeout_s if timeout_s is None else timeout_s
        )
        if timeout_ms is None:
            return {"metadata": self._metadata}
        timeout_ms = max(0, timeout_ms)
        metadata = (*self._metadata, (TIMEOUT_KEY, str(timeout_ms)))
        return {"timeout": timeout_ms / 1e3 + _GRACE_S, "metadata": metadata}

    async def _call(self, method: Callable[..., Any], request: Any) -> Any:
        timeout_ms = to_milliseconds("call_timeout_s", self._call_timeout_s)
        timeout_s = None if timeout_ms is None else timeout_ms / 1e3
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        async with self._typed_errors(call):
            return await call

    @asynccontextmanager
    async def _typed_errors(self, call: Any) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise to_error(error, self.target) from error
        except asyncio.CancelledError:
            # grpc.aio says so too when the *server* ended the call with CANCELLED.
            # A call that has ended otherwise in the same moment must not swallow the caller's own.
            if call.done() and await call.code() is grpc.StatusCode.CANCELLED:
                words = await call.details()
                if words and words != _LOCALLY_CANCELLED:
                    raise RequestAbortedError(f"{self.target}: {words}") from None
            raise

    async def __aenter__(self) -> GenerationClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


def _health_request(service: str) -> health_pb2.HealthCheckRequest:
    request = health_pb2.HealthCheckRequest()
    put(request, RequestError, service=service)
    return request


def _health_name(status: int) -> str:
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
