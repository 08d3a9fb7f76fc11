"""Sends the outputs of a request as messages of a stream, for every protocol.

`_TokenSender` drives the writes itself. With `await context.write()` in its place a server
takes 1.14 times the CPU time outside the engine per token if wake-ups are not batched
either, 1.03 times if they are (256 streams at once, medians of 5 pairs), and the output rate at 24
requests/s falls to 0.89 (median of 7 pairs; the embedded model, two CPU cores that other work
shared, measured on 2026-11-22).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from tpengine.async_engine.mailbox import Mailbox
from tpengine.errors import UnreadError
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput

Message = TypeVar("Message")
Message_co = TypeVar("Message_co", covariant=True)
Write = Callable[[Message], Coroutine[Any, Any, None]]
Positions = Iterable[tuple[int, Mapping[int, Logprob] | None]]
"""Tokens, each with its candidates by id; None: the first position of a prompt."""
_CANDIDATES_A_TURN = 1024
"""Candidates that are converted, in some milliseconds, before other tasks of the event loop run."""


def of_prompt(output: RequestOutput) -> Positions:
    """The tokens of a prompt, if they have candidates."""
    return zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)


def of_output(completion: CompletionOutput) -> Positions:
    """The tokens of an output, if they have candidates."""
    return zip(completion.token_ids, completion.logprobs or (), strict=False)


class StreamWriter(Protocol[Message_co]):
    """Makes the messages of one stream, in a protocol's own form."""

    def write_tokens(self, output: RequestOutput) -> Message_co | None:
        """The message of a delta that `has_only_tokens`; None: it needs `write`. The next call may
        change this message: serialize it first."""
        ...

    async def write(self, output: RequestOutput) -> Message_co:
        """The message of any delta."""
        ...


def has_only_tokens(delta: RequestOutput) -> bool:
    """Whether a delta has new tokens of one sequence, with their text, and nothing else: nearly all
    deltas of streams are of this kind."""
    if delta.finished or len(delta.outputs) != 1 or delta.prompt_logprobs is not None:
        return False
    completion = delta.outputs[0]
    return completion.finish_reason is None and completion.logprobs is None


class CandidateTurns:
    """Lets other tasks of the event loop run while a writer converts many candidates."""

    def __init__(self) -> None:
        self._num_candidates = 0

    async def take(self, positions: Positions) -> AsyncIterator[tuple[int, Mapping[int, Logprob]]]:
        """Yields each token with its candidates; the first of a prompt has none."""
        for token_id, candidates in positions:
            yield token_id, candidates or {}
            self._num_candidates += len(candidates or ())
            if self._num_candidates >= _CANDIDATES_A_TURN:
                self._num_candidates = 0
                await asyncio.sleep(0)


async def write_within(write_s: float, writing: Awaitable[None]) -> None:
    """Awaits a write for so many seconds.

    Raises:
        UnreadError: it has not ended by then.
    """
    try:
        async with asyncio.timeout(write_s):
            await writing
    except TimeoutError:
        raise _unread(write_s) from None


def _unread(write_s: float) -> UnreadError:
    return UnreadError(
        f"the client took nothing of its stream for {write_s:g} s (--write-timeout), and the "
        "request was ended; read faster, or ask for less",
        "decode",
    )


async def send_stream(
    mailbox: Mailbox, writer: StreamWriter[Message], write: Write[Message], write_s: float
) -> None:
    """Sends the outputs of a request as they arrive, each in a message. Outputs that arrive while a
    message is being sent, because the client reads slowly, share the next one.

    Args:
        writer: makes the messages.
        write: sends a message, which it serializes at once, and returns when there is room for
            another.
        write_s: longest time that a write may take.

    Raises:
        UnreadError: a write has taken longer; the client does not read.
        Exception: the mailbox's error, or an error of `write`.
    """
    finished = False
    while not finished:
        with closing(_TokenSender(mailbox, writer, write, write_s)) as sender:
            output = await sender.send_tokens()
        await write_within(write_s, write(await writer.write(output)))
        finished = output.finished


@dataclass(eq=False, repr=False)
class _TokenSender(Generic[Message]):
    """Sends outputs that have only tokens in the call that puts them into the mailbox.

    The task of the stream sleeps meanwhile: this object drives the coroutine of each write itself.
    After a step all streams are written in one turn of the event loop; a task per stream would take
    two turns each, and in each the engine's thread may take the interpreter's lock. The gain is at
    the head of this file.

    A write has usually ended when the next output arrives. If it has not, the future that it awaits
    tells when it has, and only now its time is bounded: a timer per token would cost all streams.
    """

    _mailbox: Mailbox
    _writer: StreamWriter[Message]
    _write: Write[Message]
    _write_s: float
    _timer: asyncio.TimerHandle | None = None
    _writing: Coroutine[Any, Any, None] | None = None
    _written: asyncio.Future[Any] | None = None
    _end: asyncio.Future[RequestOutput | BaseException] = field(default_factory=asyncio.Future)

    async def send_tokens(self) -> RequestOutput:
        """Sends outputs while `StreamWriter.write_tokens` takes them; returns the first one that it
        does not, which is not sent."""
        self._listen()
        end = await self._end
        if isinstance(end, BaseException):
            raise end
        return end

    def close(self) -> None:
        """Stops listening to the mailbox, and gives up a write that has not ended."""
        self._mailbox.listener = None
        self._stop_timer()
        self._end.cancel()
        if self._written is not None:  # gRPC fails it when the call is gone; mark that as seen
            self._written.add_done_callback(lambda write: write.cancelled() or write.exception())
        if self._writing is not None:
            self._writing.close()

    def _listen(self, _written: object = None) -> None:
        """Listens to the mailbox, and sends what is in it. Also the callback of `_written`, which
        passes that future; it is not needed here."""
        self._stop_timer()
        if not self._end.done():
            self._mailbox.listener = self._on_output
            self._on_output()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self._end.done():
            self._end.set_result(_unread(self._write_s))

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
                self._timer = asyncio.get_running_loop().call_later(self._write_s, self._give_up)
                return None
            self._advance()
        output = self._mailbox.take_now()
        if output is None:
            return None
        message = self._writer.write_tokens(output) if has_only_tokens(output) else None
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
