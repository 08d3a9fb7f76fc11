"""From a request's mailbox to its open call, at the least cost per message.

An awaited write costs asyncio two turns of a task, and an async generator between them and the
engine as much again: with hundreds of streams that is more than gRPC takes to send the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

from tpengine.async_engine.mailbox import Mailbox
from tpengine.outputs import RequestOutput
from tpengine.server.grpc.response import ResponseWriter

Write = Callable[[bytes], Coroutine[Any, Any, None]]


async def send_stream(mailbox: Mailbox, write: Write) -> None:
    """Sends a request's outputs as they come, each in a message; those that come while the one
    before is still under way, since the client reads slowly, share one.

    Args:
        write: sends a message, and returns when there is room for another.

    Raises:
        Exception: the mailbox's error, or what `write` raises.
    """
    writer = ResponseWriter()
    while True:
        with closing(_DeltaSender(mailbox, writer, write)) as sender:
            output = await sender.send_deltas()
        message = await writer.write(output)
        await write(message.SerializeToString())
        if output.finished:
            return


class _DeltaSender:
    """Sends deltas from the very call that puts them into the mailbox, while the stream's own task
    sleeps: it drives the coroutine of each write itself.

    Nobody waits for a write until the next delta is there. Then it has usually ended; if it has
    not, the future that it waits for tells when it has.
    """

    def __init__(self, mailbox: Mailbox, writer: ResponseWriter, write: Write) -> None:
        self._mailbox = mailbox
        self._writer = writer
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None
        self._written: asyncio.Future[Any] | None = None
        self._end: asyncio.Future[RequestOutput | BaseException]
        self._end = asyncio.get_running_loop().create_future()

    async def send_deltas(self) -> RequestOutput:
        """Returns the first output that is more than a delta, once those before it are written."""
        self._listen()
        end = await self._end
        if isinstance(end, BaseException):
            raise end
        return end

    def close(self) -> None:
        """Leaves the mailbox, and a write that is still under way."""
        self._mailbox.listener = None
        self._end.cancel()
        if self._written is not None:  # gRPC fails it when the call is gone, and nobody asks
            self._written.add_done_callback(lambda one: one.cancelled() or one.exception())
        if self._writing is not None:
            self._writing.close()

    def _listen(self, _: object = None) -> None:
        if not self._end.done():
            self._mailbox.listener = self._on_output
            self._on_output()

    def _on_output(self) -> None:
        try:
            self._send()
        except (Exception, asyncio.CancelledError) as error:
            # Its own task is to have it, and not whoever brings outputs to all streams.
            self._finish(error)

    def _send(self) -> None:
        """Sends what is in the mailbox, unless the write before has not ended."""
        while self._writing is not None:
            if self._written is not None and not self._written.done():
                self._mailbox.listener = None
                self._written.add_done_callback(self._listen)
                return
            self._go_on()
        output = self._mailbox.take_now()
        if output is None:
            return
        message = self._writer.write_delta(output)
        if message is None:
            self._finish(output)
            return
        self._writing = self._write(message)
        self._go_on()

    def _go_on(self) -> None:
        """Runs the write until it waits for something, or ends."""
        assert self._writing is not None
        try:
            self._written = self._writing.send(None)
        except StopIteration:
            self._writing = self._written = None

    def _finish(self, end: RequestOutput | BaseException) -> None:
        self._mailbox.listener = None
        if not self._end.done():
            self._end.set_result(end)
