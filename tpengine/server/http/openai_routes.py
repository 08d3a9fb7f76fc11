"""The routes that generate: /v1/completions and /v1/chat/completions.

The way of a request, in order (paths in tpengine/server/), and where each decision stands:
    http/protocol.py: connections, timeouts, the size of a head; what breaks HTTP is refused here.
    http/app.py: `_Entrance` knows the caller (auth.py) and counts open calls.
    http/calls.py: `read_call` reads and parses the body.
    http/read.py: `BodyReader` turns it into requests: prompts, `SamplingParams` (fields.py), tools
        (tools.py); limits.py bounds them. `naming_field` names the field of an error.
    here: `Answer` adds the requests to `AsyncLLMEngine`, whose queue is async_engine/admission.py.
        A stream that resumes is found in kept_streams.py.
A token comes back on the way of gRPC (see the head of grpc/service.py) up to stream_sender.py.
`AnswerWriter` of http/write.py takes the place of `ResponseWriter`; tool_formats.py and
reasoning.py find calls and thoughts in the text. An error becomes its answer in
http/error_answers.py, by the table `STATUSES` of errors.py. A prompt that is too long is refused
by `ServerState.check_text` or `check_num_tokens` (state.py), or by `AsyncLLMEngine._begin`, with a
`RequestIgnoredError`, which `STATUSES` makes a 400.
A client that leaves: `connection_lost` of http/protocol.py cancels the task; leaving
`AsyncLLMEngine.open` aborts the request (`RequestTable.finish`), unless the stream is kept.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tpengine.async_engine.mailbox import Mailbox
from tpengine.async_engine.request_table import unique_id
from tpengine.engine.requests import GenerateRequest
from tpengine.errors import UnreadError
from tpengine.proto import RESUME_WINDOW_KEY
from tpengine.server.http.calls import read_call, read_resumption
from tpengine.server.http.endpoints import PATHS, check_task
from tpengine.server.http.error_answers import refusal
from tpengine.server.http.json_text import JsonAnswer, event
from tpengine.server.http.read import BodyReader, naming_field
from tpengine.server.http.write import AnswerWriter, Json, Style, usage
from tpengine.server.kept_streams import KeptStream
from tpengine.server.state import ServerState
from tpengine.server.stream_sender import Write, send_stream, write_within

Served = list[tuple[Mailbox, AnswerWriter]]
"""The mailbox of each prompt, and what writes its answer."""
_STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
_STREAM_HEADERS = [_STREAM_TYPE, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_COMMENT = b": the answer is not complete yet\n\n"


def openai_routes(state: ServerState) -> list[Route]:
    """The routes. Their errors before the first byte of an answer are the application's to tell.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
    """

    async def answer(request: Request, is_chat: bool) -> Any:
        call = await read_call(request)
        check_task(state, "completions", request.url.path)
        asked = read_resumption(request, call, state.kept)
        if asked is not None and (stream := state.kept.find(asked)) is not None:
            return resumed(request, stream, asked.after)
        with naming_field(is_chat):
            read, style = await BodyReader(call, is_chat, state).read()
        requests = [replace(item, request_id=unique_id(call.request_id)) for item in read]
        request.state.request_id = call.request_id
        adapter = requests[0].lora_request
        model = state.model if adapter is None else adapter.lora_name
        head = style.head(call.request_id, int(time.time()), model)
        answer = Answer(request=request, state=state, requests=requests, style=style, head=head)
        if asked is None:
            return answer
        stream = state.kept.open(asked, call.request_id, answer.produce)
        return answer if stream is None else resumed(request, stream, 0)

    def resumed(request: Request, stream: KeptStream, after: int) -> KeptAnswer:
        request.state.request_id = stream.request_id
        headers = [(RESUME_WINDOW_KEY.encode(), b"%g" % stream.asked.window_s)]
        return KeptAnswer(request=request, state=state, headers=headers, stream=stream, after=after)

    kinds = zip(PATHS["completions"], (False, True), strict=True)
    return [Route(path, partial(answer, is_chat=kind), methods=["POST"]) for path, kind in kinds]


@dataclass(slots=True, kw_only=True)
class _EventStream(ABC):
    """An ASGI application whose answer may be a stream of events.

    Attributes:
        request: of the call.
        state: of the server.
        headers: of a stream, in addition to those of all streams.
        has_begun: whether the head of a stream was sent.
        sent_at: moment of `time.monotonic` at which a part was sent, or the call began.
        beginning: held while the head is sent.
    """

    request: Request
    state: ServerState
    headers: Sequence[tuple[bytes, bytes]] = ()
    has_begun: bool = False
    sent_at: float = field(default_factory=time.monotonic)
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the requests.

        Raises:
            RequestError, EngineError: nothing has been sent yet, or the client does not read.
        """
        try:
            await self._serve(scope, receive, send)
        except Exception as error:
            if not self.has_begun or isinstance(error, UnreadError):
                raise
            body = bytes(refusal(error, self.request.state.request_id).body)
            await self._send_last(b"data: %b\n\n" % body)

    @abstractmethod
    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the call; see `__call__`."""

    @asynccontextmanager
    async def _breaking_silence(self, send: Send) -> AsyncIterator[None]:
        """Context in which a comment is sent whenever nothing was sent for `sse_ping_s`: proxies
        end a connection that is silent. An error after the first comment is an event."""
        pings = asyncio.create_task(self._ping(send))
        try:
            yield
        finally:
            pings.cancel()

    async def _ping(self, send: Send) -> None:
        while True:
            left_s = self.sent_at + self.state.limits.sse_ping_s - time.monotonic()
            await (asyncio.sleep(left_s) if left_s > 0 else self._send_part(send, _COMMENT))

    async def _send_part(self, send: Send, part: bytes) -> None:
        """Sends a part of a stream, and before the first one its head."""
        if not self.has_begun:
            async with self.beginning:  # several prompts may have their first tokens at once
                if not self.has_begun:
                    headers = [*_STREAM_HEADERS, *self.headers]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self.has_begun = True
        self.sent_at = time.monotonic()
        # Without the layers that Starlette puts around `send`.
        await self.request.state.send(_part(part))

    async def _send_last(self, part: bytes) -> None:
        last = _part(part, more_body=False)
        await write_within(self.state.limits.write_s, self.request.state.send(last))


@dataclass(slots=True, kw_only=True)
class KeptAnswer(_EventStream):
    """One call's part of a kept stream.

    Attributes:
        after: number of the last event that the client has.
    """

    stream: KeptStream
    after: int

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = partial(self._send_part, send)
        async with self._breaking_silence(send):
            await self.stream.send(self.after, write)
            await write_within(self.state.limits.write_s, write(b""))  # the client may have had all
            await self._send_last(b"")


@dataclass(slots=True, kw_only=True)
class Answer(_EventStream):
    """The answer to one call. It submits the requests of the call, and aborts them all when it is
    left: cancelled because the client has gone, or by an error.

    Attributes:
        requests: one for each prompt.
        style: what the answer has in it.
        head: see `Style.head`.
    """

    requests: Sequence[GenerateRequest]
    style: Style
    head: Json

    async def produce(self, stream: KeptStream) -> None:
        """Serves the requests of a kept stream. Its position is the number of its last event."""

        async def keep(chunks: bytes) -> None:
            for chunk in chunks.split(b"\n\n")[:-1]:
                number = stream.position + 1
                stream.add(b"id: %d\n%b\n\n" % (number, chunk), number)

        async with AsyncExitStack() as stack:
            await keep(await self._write_stream(await self._open(stack), keep))

    async def _open(self, stack: AsyncExitStack) -> Served:
        """Submits all requests; leaving the stack ends them."""
        tokenizer = self.state.loaded_engine().llm_engine.tokenizer
        served, style = Served(), self.style
        stack.enter_context(naming_field(style.is_chat, style.constraint, style.tools))
        for place, request in enumerate(self.requests):
            writer = AnswerWriter(style, self.head, tokenizer, place * request.params.n)
            served.append((await stack.enter_async_context(self.state.open(request)), writer))
        return served

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            if self.style.streams:
                await stack.enter_async_context(self._breaking_silence(send))
            served = await self._open(stack)
            if self.style.streams:
                # The head waits for the first part, so that an error before it gets its status.
                write = partial(self._send_part, send)
                await self._send_last(await self._write_stream(served, write))
            else:
                answer = await self._whole(served)
                await answer(scope, receive, send)

    async def _write_stream(self, served: Served, write: Write[bytes]) -> bytes:
        """Writes the chunks of all requests as they come; returns what follows them. The first
        error ends all."""
        write_s = self.state.limits.write_s
        try:
            async with asyncio.TaskGroup() as tasks:
                for box, writer in served:
                    tasks.create_task(send_stream(box, writer, write, write_s))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        end = b"data: [DONE]\n\n"
        if self.style.usage:
            end = event({**self.head, "choices": [], "usage": _usage(served)}) + end
        return end

    async def _whole(self, served: Served) -> JsonAnswer:
        choices, extra = [], Json()
        for box, writer in served:
            some, extra = await writer.write_whole(await box.take())
            choices += some
        return JsonAnswer({**self.head, "choices": choices, **extra, "usage": _usage(served)})


def _usage(served: Served) -> Json:
    return usage([writer for _, writer in served])


def _part(body: bytes, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}
