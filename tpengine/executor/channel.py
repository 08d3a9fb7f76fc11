"""A message channel between driver and rank: one TCP connection each, and nothing of Ray.

A frame is a head (payload bytes, kind, epoch of the group, number of the step) and a payload. What
is said is neither encrypted nor signed: the network must be trusted; `handshake` makes sure only of
who speaks. Waiting costs no CPU: it is done in `poll`.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import time
from dataclasses import dataclass

from tpengine.errors import EngineError

MAX_FRAME_BYTES = 256 << 20
"""More than any step holds; what claims to be longer is no frame of ours."""
_HEAD = struct.Struct("<4sIIIQ")  # magic, payload bytes, kind, epoch, step
MAGIC = b"tpe1"
_RECEIVE_BYTES = 64 << 10  # more would be fresh pages for every call


class FrameKind(enum.IntEnum):
    """What a frame carries; a beat says what its sender is doing."""

    STEP = 1
    OUTPUT = 2
    FAILURE = 3
    BEAT = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of the channel."""

    kind: FrameKind
    epoch: int
    step: int
    payload: bytes


class ChannelError(EngineError):
    """The channel to a peer is closed, silent, or speaks another language."""


class ChannelClosedError(ChannelError):
    """The peer has gone."""


class ChannelTimeoutError(ChannelError):
    """The peer did not answer in time."""


class Channel:
    """One end of a connection whose other end has proved to know the secret.

    Sending and receiving may be done by two threads, each by one at a time.
    """

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        self._sock = sock
        self._epoch = epoch
        self._buffer = bytearray()
        sock.settimeout(None)

    def fileno(self) -> int:
        """For `poll`; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Ends the connection; the peer sees it. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in poll
        self._sock.close()

    def send(self, kind: FrameKind, step: int, payload: bytes, timeout_s: float) -> None:
        """Sends one frame.

        Raises:
            ChannelError: it is too long, the peer has gone, or did not take it within the timeout.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(
                f"a message of {len(payload)} bytes is longer than the channel's limit of "
                f"{MAX_FRAME_BYTES}; lower max_num_seqs or max_model_len"
            )
        head = _HEAD.pack(MAGIC, len(payload), kind, self._epoch, step)
        frame = memoryview(head + payload)
        deadline = time.monotonic() + timeout_s
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ChannelClosedError(f"the connection broke: {error}") from error
        while sent < len(frame):
            sent += self._send_more(frame[sent:], deadline, timeout_s)

    def _send_more(self, rest: memoryview, deadline: float, timeout_s: float) -> int:
        self._wait(select.POLLOUT, deadline, timeout_s)
        try:
            return self._sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosedError(f"the connection broke: {error}") from error

    def receive(self, timeout_s: float) -> Frame:
        """The next frame.

        Raises:
            ChannelError: the peer has gone, sent something else, or nothing within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while (frame := self.take()) is None:
            self._wait(select.POLLIN, deadline, timeout_s)
        return frame

    def take(self) -> Frame | None:
        """The next frame if it has arrived, without waiting.

        Raises:
            ChannelError: the peer has gone, or sent something else.
        """
        frame = self._cut()
        if frame is not None:
            return frame
        try:
            while chunk := self._sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT):
                if not self._buffer and (frame := _whole(chunk)) is not None:
                    return frame
                self._buffer += chunk
                if (frame := self._cut()) is not None:
                    return frame
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosedError(f"the connection broke: {error}") from error
        raise ChannelClosedError("the peer closed the connection")

    def _cut(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < _HEAD.size:
            return None
        kind, length, epoch, step = _read_head(buffer)
        end = _HEAD.size + length
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[_HEAD.size : end])
        del buffer[:end]
        return Frame(kind, epoch, step, payload)

    def _wait(self, event: int, deadline: float, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise ChannelTimeoutError(f"no sign of the peer for {timeout_s:.1f} s")


_KINDS = {kind.value: kind for kind in FrameKind}


def _read_head(data: bytes | bytearray) -> tuple[FrameKind, int, int, int]:
    """(kind, payload bytes, epoch, step)."""
    magic, length, kind, epoch, step = _HEAD.unpack_from(data)
    if magic != MAGIC or length > MAX_FRAME_BYTES or kind not in _KINDS:
        raise ChannelError(f"not a frame: {bytes(data[: _HEAD.size])!r}")
    return _KINDS[kind], length, epoch, step


def _whole(chunk: bytes) -> Frame | None:
    """The frame that a chunk is, no less and no more, as almost every one is."""
    if len(chunk) < _HEAD.size:
        return None
    kind, length, epoch, step = _read_head(chunk)
    if len(chunk) != _HEAD.size + length:
        return None
    return Frame(kind, epoch, step, chunk[_HEAD.size :])
