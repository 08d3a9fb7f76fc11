"""`KeptStreams`: streams that go on when their client's connection ends, until it resumes them.

The request of a kept stream runs in a task of its own. That task writes messages here, and each
call of the client reads them from here: the first one, and those that resume. All other streams
are written directly, and do not pass this file. All of it runs on the event loop, so nothing is
locked.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tpengine.errors import (
    DuplicateRequestError,
    InvalidPromptError,
    MalformedRequestError,
    NotKeptError,
    RequestAbortedError,
)
from tpengine.server.auth import Client
from tpengine.server.limits import Limits, OpenCalls

Write = Callable[[bytes], Awaitable[None]]
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

    def engine_id(self, request_id: str) -> str:
        """The engine's id of a request: those of other clients may have the same `request_id`."""
        return f"{request_id}@{self.account.rpartition(' ')[2]}"


class KeptStream:
    """The messages of one stream. Each ends at a position, which the protocol counts.

    Args:
        table: that holds the stream.
        asked: by the call that begins it.
        request_id: for its client.
        engine_ids: of its requests in the engine.

    Attributes:
        position: of the newest message.
    """

    def __init__(
        self, table: KeptStreams, asked: Resumption, request_id: str, engine_ids: Sequence[str]
    ) -> None:
        self.asked = asked
        self.request_id = request_id
        self.engine_ids = engine_ids
        self.position = 0
        self._table = table
        self._messages: dict[int, tuple[int, bytes]] = {}  # by number: position, message
        self._first = self._next = 0  # numbers of the oldest message, and of the next one
        self._dropped_position = 0  # of the newest message that is not here any more
        self._num_sent = 0  # number of the message that the newest reader needs next
        self._num_bytes = _STREAM_BYTES
        self._news = asyncio.Event()
        self._is_over = False
        self._error: Exception | None = None
        self._reader: asyncio.Timeout | None = None
        self._is_counted = False  # as a request without a reader
        self._window: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self._num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether its request has ended and no client reads it."""
        return self._is_over and self._reader is None

    def begin(self, produce: Produce) -> None:
        """Runs its request. The window runs until the first reader comes."""
        self._task = asyncio.create_task(self._run(produce))
        self._await_reader()

    async def _run(self, produce: Produce) -> None:
        try:
            await produce(self)
        except Exception as error:
            self.end(error)
        else:
            self.end()

    def add(self, message: bytes, position: int) -> None:
        """Adds a message that ends at this position.

        If there is no room for it, the oldest messages that a reader was sent are dropped.

        Raises:
            NotKeptError: the messages that no reader was sent leave no room.
        """
        if self._is_over:  # it was dropped while this message was made
            return
        size = len(message) + _MESSAGE_BYTES
        while not self._table.has_room(self._num_bytes, size):
            if self._first >= self._num_sent:
                raise NotKeptError(
                    f"the stream was ended: {self._num_bytes} bytes of it wait for a reader, and a "
                    f"stream may keep {self._table.limits.max_resume_bytes}, all together "
                    f"{self._table.limits.max_all_resume_bytes}; resume sooner, or ask for less"
                )
            self._dropped_position, oldest = self._messages.pop(self._first)
            self._first += 1
            self._grow(-len(oldest) - _MESSAGE_BYTES)
        self._grow(size)
        self._messages[self._next] = position, message
        self._next += 1
        self.position = position
        self._news.set()

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._table.num_bytes += num_bytes

    def end(self, error: Exception | None = None) -> None:
        """Ends the stream after its last message; only the first call counts.

        Args:
            error: what a reader gets there; None: the stream is complete.
        """
        if self._is_over:
            return
        self._is_over, self._error = True, error
        self._news.set()
        self._count()
        # A repeated request begins anew if its client was sent nothing; an abort is for good.
        if error is not None and (not self._next or isinstance(error, RequestAbortedError)):
            self._table.drop(self)

    def stop(self) -> None:
        """Ends the stream, and its request if that runs; the table has dropped it."""
        self.end(NotKeptError("the stream was not read in time, and was dropped; begin a new one"))
        for work in (self._window, self._task):
            if work is not None:
                work.cancel()

    async def send(self, after: int, write: Write) -> None:
        """Sends a reader all messages after a position, also those to come. The reader takes the
        place of an earlier one, whose call may seem open after its connection is dead.

        Raises:
            NotKeptError, InvalidPromptError: see `_number_after`.
            RequestAbortedError: a later reader has come.
            Exception: that of the request, after its last message, or of `write`.
        """
        number = self._number_after(after)
        if self._reader is not None:
            self._reader.reschedule(asyncio.get_running_loop().time())
        scope = asyncio.timeout(None)
        self._table.num_readers += 1
        try:
            async with scope:
                self._take_reader(scope, number)
                while self._reader is scope and (number < self._next or not self._is_over):
                    if number == self._next:
                        self._news.clear()
                        await self._news.wait()
                        continue
                    await write(self._messages[number][1])
                    number += 1
                    if self._reader is scope:
                        self._num_sent = number
            if self._reader is not scope:
                raise TimeoutError  # as if the scope had ended the last write
        except TimeoutError:
            raise RequestAbortedError(
                "another call has resumed this stream, and reads it now"
            ) from None
        finally:
            self._table.num_readers -= 1
            if self._reader is scope:
                self._reader = None
                self._await_reader()
        if self._error is not None:
            raise self._error

    def _take_reader(self, reader: asyncio.Timeout, number: int) -> None:
        self._reader, self._num_sent = reader, number
        if self._window is not None:
            self._window.cancel()
        self._count()

    def _await_reader(self) -> None:
        """Begins the time without a reader."""
        if self._table.holds(self):
            loop = asyncio.get_running_loop()
            self._window = loop.call_later(self.asked.window_s, self._table.drop, self)
        self._count()

    def _count(self) -> None:
        """Counts the request for its client while it runs without a reader."""
        counts = self._reader is None and not self._is_over
        self._table.detached.update({self.asked.account: counts - self._is_counted})
        self._table.detached += Counter()  # forgets accounts without any
        self._is_counted = counts

    def _number_after(self, after: int) -> int:
        """The number of the message after a position.

        Raises:
            NotKeptError: that message is not kept any more.
            InvalidPromptError: no message ends there.
        """
        if after < self._dropped_position:
            raise NotKeptError(
                f"the stream is kept from position {self._dropped_position} on, not from {after}; "
                f"what was sent is dropped above {self._table.limits.max_resume_bytes} bytes"
            )
        if after == self._dropped_position:
            return self._first
        numbers = range(self._first, self._next)
        place = bisect_left(numbers, after, key=lambda number: self._messages[number][0])
        if place == len(numbers) or self._messages[numbers[place]][0] != after:
            raise InvalidPromptError(
                f"resume_from, over HTTP last-event-id, is {after}, where no message of this "
                f"stream ends, which has come to {self.position}; give the end of the last message "
                "that you have"
            )
        return numbers[place] + 1


class KeptStreams:
    """The kept streams of a server, of all doors.

    Attributes:
        num_bytes: memory that they take.
        num_readers: calls that read one.
        detached: by account, the requests that run without a reader.
    """

    def __init__(self, limits: Limits, calls: OpenCalls) -> None:
        self.limits = limits
        self.num_bytes = self.num_readers = 0
        self.detached: Counter[str] = Counter()
        self._calls = calls
        self._streams: dict[tuple[str, str], KeptStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

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
            raise MalformedRequestError(
                f"{name} must be a number of seconds of at least 0, got {str(asked)[:20]!r}"
            )
        return min(asked_s, self.limits.resume_window_s)

    def find(self, asked: Resumption) -> KeptStream | None:
        """The stream that a call resumes; None: the call begins a new one.

        Raises:
            DuplicateRequestError: the stream of this key has another request.
            NotKeptError: the client has a part of a stream that is not kept.
        """
        stream = self._streams.get((asked.account, asked.key))
        if stream is None:
            if asked.after:
                raise NotKeptError(
                    f"no stream of yours with this key is kept, and you have it to {asked.after}: "
                    "its window has passed, it was aborted, or the server began anew; begin a new "
                    "one with another key"
                )
            return None
        if stream.asked.digest != asked.digest:
            raise DuplicateRequestError(
                "your stream of this key has another request; repeat that one, or take another key"
            )
        return stream

    def open(
        self, asked: Resumption, request_id: str, engine_ids: Sequence[str], produce: Produce
    ) -> KeptStream:
        """The stream of a call: begins it, or finds it if a call has begun it in the meantime.

        Args:
            see `KeptStream`.

        Raises:
            DuplicateRequestError, NotKeptError: see `find`.
            QueueFullError: the client has too many requests without a reader.
        """
        found = self.find(asked)
        if found is not None:
            return found
        self._calls.check_detached(asked.account, self.detached[asked.account])
        stream = KeptStream(self, asked, request_id, engine_ids)
        self._streams[asked.account, asked.key] = stream
        self.num_bytes += stream.num_bytes
        stream.begin(produce)
        return stream

    def holds(self, stream: KeptStream) -> bool:
        """Whether a stream can be resumed."""
        return self._streams.get((stream.asked.account, stream.asked.key)) is stream

    def of_request(self, client: Client, request_id: str) -> list[KeptStream]:
        """The streams of a request that a client may abort."""
        return [
            one
            for one in self._streams.values()
            if one.request_id == request_id
            and (one.asked.account == client.account or "admin" in client.may)
        ]

    def drop(self, stream: KeptStream) -> None:
        """Forgets a stream, and ends its request."""
        if self.holds(stream):
            del self._streams[stream.asked.account, stream.asked.key]
            self.num_bytes -= stream.num_bytes
            stream.stop()

    def has_room(self, num_bytes: int, more: int) -> bool:
        """Whether a stream of some bytes may grow. Streams that have ended and that no client reads
        are dropped for it, the oldest first."""
        if num_bytes + more > self.limits.max_resume_bytes:
            return False
        while self.num_bytes + more > self.limits.max_all_resume_bytes:
            idle = next((one for one in self._streams.values() if one.is_idle), None)
            if idle is None:
                return False
            self.drop(idle)
        return True
