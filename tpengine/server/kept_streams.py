"""`KeptStreams`: streams that go on when their client's connection ends, until it resumes them.

The request of a kept stream runs in a task of its own. That task adds messages here, and each call
of the client reads them from here: the first one, and those that resume. All other streams are
written directly, and do not pass this file. All of it runs on the event loop, so nothing is locked.

A stream is dropped when no client has read it for the window (`KeptStream._await_reader`), or,
unread, to make room for another one (`KeptStreams.make_room`).
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import itemgetter

from tpengine import errors
from tpengine.server.auth import Client
from tpengine.server.limits import Limits, OpenCalls, change_count
from tpengine.server.stream_sender import Write, write_within

Produce = Callable[["KeptStream"], Awaitable[None]]
"""Serves the requests of a stream, and adds its messages."""
_MESSAGE_BYTES, _STREAM_BYTES = 256, 4096
"""Memory of a message besides its own bytes, and of a stream without messages."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a call asks of kept streams.

    Attributes:
        account: of its client; see `Client`. Other clients' streams are not found.
        key: the client's name for the stream, with that of the protocol.
        digest: of the request, without what it says of resumption.
        window_s: seconds for which the stream is kept without a reader; 0: a new one is not kept.
        after: position that the client has; 0: none.
    """

    account: str
    key: str
    digest: bytes
    window_s: float
    after: int


class KeptStream:
    """The messages of one stream. Each ends at a position, which the protocol counts.

    Args:
        table: that holds the stream.
        asked: by the call that begins it.
        request_id: for its client; the engine's ids are `unique_id` of it.

    Attributes:
        position: of the newest message.
        num_bytes: memory that it takes.
        reader: ends the call that reads it; None: no call does.
        is_over: whether no more messages come.
    """

    def __init__(self, table: KeptStreams, asked: Resumption, request_id: str) -> None:
        self.asked, self.request_id = asked, request_id
        self.position, self.num_bytes = 0, _STREAM_BYTES
        self.reader: asyncio.Timeout | None = None
        self.is_over = False
        self._table = table
        self._messages: list[tuple[int, bytes]] = []  # each with the position before it
        self._num_dropped = 0  # messages that were before those
        self._num_sent = 0  # number of the message that the reader needs next
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._window: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, produce: Produce) -> None:
        """Runs its request. The window runs until the first reader comes."""
        self._task = asyncio.create_task(self._run(produce))
        self._await_reader()

    async def _run(self, produce: Produce) -> None:
        try:
            await produce(self)
        except Exception as error:
            self.end(error)
        self.end()

    def add(self, message: bytes, position: int) -> None:
        """Adds a message that ends at this position.

        If there is no room for it, the older half of what a reader was sent is dropped.

        Raises:
            NotKeptError: those that no reader was sent leave no room.
        """
        if self.is_over:  # it was dropped while this message was made
            return
        size = len(message) + _MESSAGE_BYTES
        while not self._table.make_room(self, size):
            count = (self._num_sent - self._num_dropped + 1) // 2
            if not count:
                if self._table.may_pass(self, size):
                    break
                raise errors.NotKeptError(
                    f"the stream was ended: {self.num_bytes} bytes of it wait for a reader, and "
                    "there is no room for more (max_resume_bytes, max_all_resume_bytes); resume "
                    "sooner"
                )
            self._grow(-sum(len(old) + _MESSAGE_BYTES for _, old in self._messages[:count]))
            del self._messages[:count]
            self._num_dropped += count
        self._grow(size)
        self._messages.append((self.position, message))
        self.position = position
        self._news.set()

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._table.count(self.asked.account, num_bytes)

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after its last message; only the first call counts.

        Args:
            error: what a reader gets there; None: the stream is complete.
        """
        if self.is_over:
            return
        self.is_over, self._error = True, error
        self._news.set()
        # A repeated request begins anew if its client was sent nothing; an abort is for good.
        if error and (not self.position or isinstance(error, errors.RequestAbortedError)):
            self._table.drop(self)

    def stop(self) -> None:
        """Ends the stream, and its request if that runs; the table has dropped it."""
        why = "the stream was not read in time, or gave way to those of other clients"
        self.end(errors.NotKeptError(f"{why} (max_all_resume_bytes); begin a new one"))
        for work in (self._window, self._task):
            if work is not None:
                work.cancel()

    async def send(self, after: int, write: Write[bytes]) -> None:
        """Sends a reader all messages after a position, also those to come. The reader takes the
        place of an earlier one, whose call may seem open after its connection is dead.

        Raises:
            NotKeptError: no message that is kept begins there.
            RequestAbortedError: a later reader has come.
            UnreadError: a write has taken longer than `write_s`.
            Exception: that of the request, after its last message, or of `write`.
        """
        number = self._number_after(after)
        if self.reader is not None:
            self.reader.reschedule(asyncio.get_running_loop().time())
        if self._window is not None:
            self._window.cancel()
        self.reader = scope = asyncio.timeout(None)
        self._num_sent = number
        try:
            async with scope:
                await self._send_from(number, scope, write)
        except TimeoutError:
            why = "another call has resumed this stream, and reads it now"
            raise errors.RequestAbortedError(why) from None
        finally:
            if self.reader is scope:
                self.reader = None
                self._await_reader()
        if self._error is not None:
            raise self._error

    async def _send_from(self, number: int, reader: asyncio.Timeout, write: Write[bytes]) -> None:
        """Sends messages while there is no later reader.

        Raises:
            TimeoutError: there is one.
        """
        while True:
            place = number - self._num_dropped
            if place < len(self._messages):
                await write_within(self._table.write_s, write(self._messages[place][1]))
                number += 1
            elif self.is_over:
                return
            else:
                self._news.clear()
                await self._news.wait()
            if self.reader is not reader:
                raise TimeoutError
            self._num_sent = number

    def _await_reader(self) -> None:
        """Begins the time without a reader."""
        if self._table.holds(self):
            loop = asyncio.get_running_loop()
            self._window = loop.call_later(self.asked.window_s, self._table.drop, self)

    def _number_after(self, after: int) -> int:
        place = bisect_left(self._messages, after, key=itemgetter(0))
        begins = [start for start, _ in self._messages[place : place + 1]]
        if after not in (begins or [self.position]):
            raise errors.NotKeptError(
                f"no message that is kept of this stream begins after position {after} "
                "(resume_from, or last-event-id): it is inside one, not reached yet, or dropped "
                f"for want of room; the stream has come to {self.position}"
            )
        return self._num_dropped + place


class KeptStreams:
    """The kept streams of a server, of all doors.

    Attributes:
        num_bytes: memory that they take.
        write_s: longest time in seconds in which a client takes no message.
    """

    def __init__(self, limits: Limits, calls: OpenCalls) -> None:
        self.num_bytes, self.write_s = 0, limits.write_s
        self._limits, self._calls = limits, calls
        self._held: Counter[str] = Counter()  # bytes by account
        self._streams: dict[tuple[str, str], KeptStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def are_read(self) -> bool:
        """Whether a client reads one."""
        return any(stream.reader is not None for stream in self._streams.values())

    def granted_s(self, name: str, asked: str | float) -> float:
        """The window of a stream for which a client asks for one.

        Args:
            name: of the field, for the message.
            asked: seconds.

        Raises:
            MalformedRequestError: it is not a number of at least 0.
        """
        try:
            asked_s = float(asked)
        except ValueError:
            asked_s = math.nan
        if not asked_s >= 0:
            text = f"{name} must be a number of seconds of at least 0, got {str(asked)[:20]!r}"
            raise errors.MalformedRequestError(text, field=name)
        return min(asked_s, self._limits.resume_window_s)

    def find(self, asked: Resumption) -> KeptStream | None:
        """The stream that a call resumes; None: the call begins a new one.

        Raises:
            DuplicateRequestError: the stream of this key has another request.
            NotKeptError: the client has a part of a stream that is not kept.
        """
        stream = self._streams.get((asked.account, asked.key))
        if stream is None and asked.after:
            raise errors.NotKeptError(
                f"no stream of yours with this key is kept, and you have it to {asked.after}: its "
                "window has passed, it was aborted or gave way, or the server began anew; take "
                "another key"
            )
        if stream is not None and stream.asked.digest != asked.digest:
            raise errors.DuplicateRequestError(
                "your stream of this key has another request; repeat that one, or take another key"
            )
        return stream

    def open(self, asked: Resumption, request_id: str, produce: Produce) -> KeptStream | None:
        """The stream of a call: begins it, or finds it if a call has begun it meanwhile; None:
        there is no room to keep it, and the call is served like one that does not ask for that.

        Args:
            see `KeptStream`.

        Raises:
            DuplicateRequestError, NotKeptError: see `find`.
            QueueFullError: the client has too many requests without a reader.
        """
        stream = self.find(asked)
        if stream is not None:
            return stream
        own = [stream for stream in self._streams.values() if stream.asked.account == asked.account]
        num_detached = sum(stream.reader is None and not stream.is_over for stream in own)
        self._calls.check_detached(asked.account, num_detached)
        stream = KeptStream(self, asked, request_id)
        if not self.make_room(stream, stream.num_bytes):
            return None
        self._streams[asked.account, asked.key] = stream
        self.count(asked.account, stream.num_bytes)
        stream.begin(produce)
        return stream

    def holds(self, stream: KeptStream) -> bool:
        """Whether a stream can be resumed."""
        return self._streams.get((stream.asked.account, stream.asked.key)) is stream

    def of_request(self, client: Client, request_id: str) -> list[KeptStream]:
        """The streams of a request that a client may abort."""
        streams = [stream for stream in self._streams.values() if stream.request_id == request_id]
        if client.is_admin:
            return streams
        return [stream for stream in streams if stream.asked.account == client.owner.account]

    def drop(self, stream: KeptStream) -> None:
        """Forgets a stream, and ends its request."""
        if self.holds(stream):
            del self._streams[stream.asked.account, stream.asked.key]
            self.count(stream.asked.account, -stream.num_bytes)
            stream.stop()

    def count(self, account: str, num_bytes: int) -> None:
        """Counts bytes that a client's streams take, or give back."""
        self.num_bytes += num_bytes
        change_count(self._held, account, num_bytes)

    def make_room(self, stream: KeptStream, size: int) -> bool:
        """Whether a stream may grow by some bytes. Streams that no client reads are dropped for it,
        the oldest first: those that have ended, then, if its client holds no more than its share,
        those of clients that hold more. A share is an equal part of all bytes."""
        if stream.num_bytes + size > self._limits.max_resume_bytes:
            return False
        if self._lacks(size):
            account = stream.asked.account
            share = self._limits.max_all_resume_bytes / len({*self._held, account})
            self._drop_unread(size, lambda other: other.is_over)
            if self._held[account] + size <= share:
                self._drop_unread(size, lambda other: self._held[other.asked.account] > share)
        return not self._lacks(size)

    def may_pass(self, stream: KeptStream, size: int) -> bool:
        """Whether a stream without room goes on unkept: a client reads it, so its messages leave at
        once, and a later call does not find them."""
        is_short = stream.num_bytes + size <= self._limits.max_resume_bytes
        return stream.reader is not None and is_short

    def _drop_unread(self, size: int, may_go: Callable[[KeptStream], bool]) -> None:
        """Drops streams that no client reads, the oldest first, until there is room."""
        for stream in list(self._streams.values()) if self._lacks(size) else ():
            if stream.reader is None and may_go(stream):
                self.drop(stream)
            if not self._lacks(size):
                break  # there may be tens of thousands

    def _lacks(self, size: int) -> bool:
        return self.num_bytes + size > self._limits.max_all_resume_bytes
