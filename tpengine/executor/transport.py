"""A message channel between driver and rank: one TCP connection each, and nothing of Ray.

A frame is a head (payload bytes, kind, epoch of the group, number of the step) and a payload. Both
ends prove that they know the group's secret before anything else is said: each answers the other's
random challenge with an HMAC. What is said afterwards is neither encrypted nor signed: the network
must be trusted. Waiting costs no CPU: it is done in `poll`.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import queue
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

from tpengine.errors import EngineError

HANDSHAKE_TIMEOUT_S = 2.0
MAX_FRAME_BYTES = 256 << 20
"""More than any step holds; what claims to be longer is no frame of ours."""
_HEAD = struct.Struct("<4sIIIQ")  # magic, payload bytes, kind, epoch, step
_MAGIC = b"tpe1"
_HELLO = struct.Struct("<4sII32s32s")  # magic, rank, epoch, challenge, proof
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_RECEIVE_BYTES = 64 << 10  # more would be fresh pages for every call
_KEEP_ALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))  # s, s, probes
_USER_TIMEOUT_MS = 3000
"""How long sent bytes may stay unacknowledged: a lost link, not a busy peer, as the kernel answers
for that."""
_MAX_HANDSHAKES = 64


class FrameKind(enum.IntEnum):
    """What a frame carries."""

    STEP = 1
    OUTPUT = 2
    FAILURE = 3


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
        head = _HEAD.pack(_MAGIC, len(payload), kind, self._epoch, step)
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
    if magic != _MAGIC or length > MAX_FRAME_BYTES or kind not in _KINDS:
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


class Listener:
    """Where the ranks of one group connect to, on the address of the driver's node alone."""

    def __init__(self, address: str, secret: bytes, epoch: int) -> None:
        self._secret = secret
        self._epoch = epoch
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.bind((address, 0))  # the kernel chooses the port
            self._sock.listen(_MAX_HANDSHAKES)
        except OSError as error:
            self._sock.close()
            raise ChannelError(f"cannot listen on {address}: {error}") from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]

    def accept(self, size: int, timeout_s: float) -> list[Channel]:
        """The channels of ranks 0 to `size` - 1, in this order.

        Strangers are turned away; each handshake has a thread, so that none holds up the others.

        Raises:
            ChannelTimeoutError: ranks are missing; the message names them.
        """
        deadline = time.monotonic() + timeout_s
        arrived: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        channels: dict[int, Channel] = {}
        handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        try:
            while len(channels) < size:
                with contextlib.suppress(queue.Empty):
                    rank, channel = arrived.get_nowait()
                    if rank < size and rank not in channels:
                        channels[rank] = channel
                    else:
                        channel.close()
                    continue
                if time.monotonic() > deadline:
                    missing = sorted(set(range(size)) - channels.keys())
                    raise ChannelTimeoutError(
                        f"ranks {missing} did not connect to {self.address[0]}:{self.address[1]} "
                        f"within {timeout_s:.0f} s; is that address reachable from their nodes?"
                    )
                self._accept_one(arrived, handshakes)
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return [channels[rank] for rank in range(size)]

    def _accept_one(
        self,
        arrived: queue.SimpleQueue[tuple[int, Channel]],
        handshakes: threading.BoundedSemaphore,
    ) -> None:
        self._sock.settimeout(0.01)  # between two looks at what the handshakes brought
        try:
            sock, _ = self._sock.accept()
        except TimeoutError:
            return
        if not handshakes.acquire(blocking=False):
            sock.close()
            return

        def greet() -> None:
            try:
                arrived.put(_greet_rank(sock, self._secret, self._epoch))
            except (OSError, ChannelError):
                sock.close()
            finally:
                handshakes.release()

        threading.Thread(target=greet, name="tpengine-handshake", daemon=True).start()

    def close(self) -> None:
        """No more connections; those that were accepted stay."""
        self._sock.close()


def connect(
    address: tuple[str, int], secret: bytes, rank: int, epoch: int, timeout_s: float
) -> Channel:
    """Connects a rank to its driver.

    Raises:
        ChannelError: the driver cannot be reached, or does not know the secret.
    """
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise ChannelError(f"cannot reach the driver at {address[0]}:{address[1]}: {error}") from (
            error
        )
    try:
        _tune(sock)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        challenge = _receive_exactly(sock, _NONCE_BYTES, deadline)
        own = secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(secret, b"rank", challenge, own, rank, epoch)
        sock.sendall(_HELLO.pack(_MAGIC, rank, epoch, own, proof))
        answer = _receive_exactly(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(answer, _proof(secret, b"driver", own, challenge, rank, epoch)):
            raise ChannelError(f"{address[0]}:{address[1]} does not know the group's secret")
    except (OSError, ChannelError) as error:
        sock.close()
        if isinstance(error, ChannelError):
            raise
        raise ChannelError(f"no handshake with {address[0]}:{address[1]}: {error}") from error
    return Channel(sock, epoch)


def _greet_rank(sock: socket.socket, secret: bytes, epoch: int) -> tuple[int, Channel]:
    """The driver's side of the handshake."""
    _tune(sock)
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = secrets.token_bytes(_NONCE_BYTES)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    sock.sendall(challenge)
    hello = _receive_exactly(sock, _HELLO.size, deadline)
    magic, rank, rank_epoch, nonce, proof = _HELLO.unpack(hello)
    expected = _proof(secret, b"rank", challenge, nonce, rank, epoch)
    if magic != _MAGIC or rank_epoch != epoch or not hmac.compare_digest(proof, expected):
        raise ChannelError("the peer does not know the group's secret")
    sock.sendall(_proof(secret, b"driver", nonce, challenge, rank, epoch))
    return rank, Channel(sock, epoch)


def _proof(secret: bytes, side: bytes, theirs: bytes, own: bytes, rank: int, epoch: int) -> bytes:
    """Names its side, so that a challenge cannot be sent back to who posed it."""
    said = side + theirs + own + struct.pack("<II", rank, epoch)
    return hmac.digest(secret, said, "sha256")


def _receive_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0.0:
            raise ChannelTimeoutError(f"no handshake within {HANDSHAKE_TIMEOUT_S:.0f} s")
        sock.settimeout(left)
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ChannelClosedError("the peer closed the connection during the handshake")
        data += chunk
    return data


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
