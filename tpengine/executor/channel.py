"""The channel between the driver and a rank: its frames, and how it is opened.

Ranks that a launcher of this machine has started inherit their ends of Unix sockets: nothing
listens, and no other process can connect. Ranks in a cluster connect over TCP (`Listener`), with a
handshake.

Why it is our own and not Ray's: a step is one small message to every rank and one back, many times
a second. Measured with Ray 2.60 on two cores, two actors, 2.2 KB there and 0.9 KB back; median,
and 99th percentile in parentheses:

    actor call and `ray.get`   770 to 1010 us (1500 to 3200); 500 us of driver CPU time per step
    Ray's compiled graph        85 to 140 us (190 to 300); 1.95 cores busy while idle
    own TCP socket              45 to 69 us (84 to 135); 0.005 cores busy while idle

`python tests/benchmarks transport` measures the three again. A wait costs no CPU: it is a `poll`.

On one machine messages could pass by shared memory. That was built and measured (docs/figures.md):
47 against 56 us to two ranks, no difference in an engine, and slower if a side spins.

A frame is a head (payload bytes, kind, number of the step or call) and a payload.
Frames are neither encrypted nor signed, unless TLS is wanted (`rank_tls`): the network must be
trusted. The handshake only proves who speaks: each end answers the other's random challenge with an
HMAC, keyed by the group's secret, over the challenge, the rank, the epoch and the index of the
channel.
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
from collections.abc import Callable
from dataclasses import dataclass

from tpengine.errors import TemporaryError
from tpengine.executor.rank_tls import TlsEnd, check, end_of, secured
from tpengine.host import start_thread

MAX_FRAME_BYTES = 256 << 20
"""More than any step holds. A head that claims more is not a head of a frame."""
HANDSHAKE_TIMEOUT_S = 2.0

_MAGIC = b"tpe1"
_HEAD = struct.Struct("<4sIIQ")  # magic, payload bytes, kind, number
_HELLO = struct.Struct("<4sIII32s32s")  # magic, rank, epoch, index, challenge, proof
_CHALLENGE_BYTES = 32
_PROOF_BYTES = 32
_RECEIVE_BYTES = 64 << 10  # a larger buffer means fresh memory pages for every call
_KEEP_ALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))  # s, s, packets
_USER_TIMEOUT_MS = 3000
"""How long sent bytes may stay unacknowledged. The peer's kernel acknowledges them also when its
process is busy or stopped, so this finds lost links only."""
_MAX_HANDSHAKES = 64
_POLL_S = 0.01
_RETRY_S = 0.1


class FrameKind(enum.IntEnum):
    """What a frame carries."""

    STEP = 1
    CALL = 2
    """A method, its arguments."""
    ANSWER = 3
    """What the step or the call returned."""
    FAILURE = 4
    """Its exception: the fields of a `RankFailure`."""
    HEARTBEAT = 5
    """From a rank: the phase that it is in, and its step."""


_KINDS = {kind.value: kind for kind in FrameKind}


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of the channel.

    Attributes:
        number: of the step or call; the answer has the same.
    """

    kind: FrameKind
    number: int
    payload: bytes


class ChannelError(TemporaryError):
    """The channel is closed, the peer does not answer, or what it sends is not a frame."""


class ChannelClosedError(ChannelError):
    """The peer closed the connection, or the connection broke."""


class ChannelTimeoutError(ChannelError):
    """The peer did not answer in time."""


class Channel:
    """One end of a connection whose peer has proved that it knows the secret.

    One thread may send while another one receives.
    """

    def __init__(self, sock: socket.socket | TlsEnd) -> None:
        self._sock = sock
        self._buffer = bytearray()
        sock.settimeout(None)

    def fileno(self) -> int:
        """The descriptor, for `poll`; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the connection, which the peer notices. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the `poll` of a thread that receives
        self._sock.close()

    def send(self, kind: FrameKind, number: int, payload: bytes, timeout_s: float) -> None:
        """Sends one frame.

        Raises:
            ChannelError: the payload is too long, the peer closed the connection, or it did not
                take the frame within the timeout.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ChannelError(
                f"a message of {len(payload)} bytes is longer than the channel's limit of "
                f"{MAX_FRAME_BYTES}; lower max_num_seqs or max_model_len"
            )
        rest = memoryview(_HEAD.pack(_MAGIC, len(payload), kind, number) + payload)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sent = self._sock.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ChannelClosedError(f"the connection broke: {error}") from error
            if sent == len(rest):
                return
            rest = rest[sent:]
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise ChannelTimeoutError(f"the peer read nothing for {timeout_s:.1f} s")

    @property
    def has_rest(self) -> bool:
        """Whether more than the frames that were taken has been received."""
        return bool(self._buffer)

    def take(self) -> Frame | None:
        """Returns the next frame if it has arrived; does not wait.

        Raises:
            ChannelError: the peer closed the connection, or sent something else than a frame.
        """
        while (frame := _first_frame(self._buffer)) is None:
            try:
                chunk = self._sock.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosedError(f"the connection broke: {error}") from error
            if not chunk:
                raise ChannelClosedError("the peer closed the connection")
            # Nearly every chunk is one whole frame, which need not pass the buffer.
            if not self._buffer and (frame := _first_frame(chunk)) is not None:
                self._buffer += chunk[_HEAD.size + len(frame.payload) :]
                return frame
            self._buffer += chunk
        del self._buffer[: _HEAD.size + len(frame.payload)]
        return frame


def _first_frame(data: bytes | bytearray) -> Frame | None:
    """The frame that `data` begins with; None: it has not arrived as a whole.

    Raises:
        ChannelError: `data` begins with something else than a frame.
    """
    if len(data) < _HEAD.size:
        return None
    magic, length, kind, number = _HEAD.unpack_from(data)
    if magic != _MAGIC or length > MAX_FRAME_BYTES or kind not in _KINDS:
        raise ChannelError(f"not a frame: {bytes(data[: _HEAD.size])!r}")
    end = _HEAD.size + length
    if len(data) < end:
        return None
    return Frame(_KINDS[kind], number, bytes(memoryview(data)[_HEAD.size : end]))


Check = Callable[[], None]
"""Called during everything that may take long; an exception of it ends the wait."""
Invitation = tuple[tuple[str, int], bytes]
"""What a rank needs to connect: (host, port), and the group's secret."""


class Listener:
    """Accepts the channels of one group's ranks, on the address of the driver's node only.

    Attributes:
        address: (host, port).
        invitation: for the ranks.
    """

    def __init__(self, address: str, secret: bytes, epoch: int) -> None:
        self._secret = secret
        self._epoch = epoch
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            check()
            # The kernel chooses the port.
            self._sock = socket.create_server((address, 0), family=family, backlog=_MAX_HANDSHAKES)
        except OSError as error:
            raise ChannelError(f"cannot listen on {address}: {error}") from error
        self._sock.setblocking(False)
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self.invitation: Invitation = self.address, secret
        self._arrived: queue.SimpleQueue[tuple[tuple[int, int], Channel]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def accept(
        self, size: int, timeout_s: float, check: Check = lambda: None, per_rank: int = 1
    ) -> list[Channel]:
        """Waits for `per_rank` channels of each of `size` ranks; refuses peers without the secret.

        Args:
            check: called repeatedly while channels are missing; an exception of it ends the wait.

        Returns:
            The channels, ordered by rank, then by index.

        Raises:
            ChannelTimeoutError: ranks did not connect within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        wanted = [(rank, index) for rank in range(size) for index in range(per_rank)]
        channels: dict[tuple[int, int], Channel] = {}
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            while missing := {rank for rank, index in wanted if (rank, index) not in channels}:
                check()
                if time.monotonic() > deadline:
                    raise ChannelTimeoutError(
                        f"ranks {sorted(missing)} did not connect to {self.address[0]}:"
                        f"{self.address[1]} within {timeout_s:.0f} s; make that address reachable "
                        "from their nodes"
                    )
                # A short wait: a handshake that ends in its thread does not end the `poll`.
                if poll.poll(_POLL_S * 1e3):
                    self.greet()
                while not self._arrived.empty():
                    key, channel = self._arrived.get()
                    if key not in wanted:
                        channel.close()
                        continue
                    if key in channels:  # a rank that connects again has given up its first attempt
                        channels[key].close()
                    channels[key] = channel
        except BaseException:
            for channel in channels.values():
                channel.close()
            raise
        return [channels[key] for key in wanted]

    def greet(self) -> None:
        """Accepts one connection. Its handshake runs in a thread, so that a slow peer does not
        delay the others."""
        try:
            sock, _ = self._sock.accept()
        except OSError:  # the peer has gone
            return
        if not self._handshakes.acquire(blocking=False):
            sock.close()
            return

        def greet() -> None:
            try:
                self._arrived.put(_greet_rank(sock, self._secret, self._epoch))
                if self._sock.fileno() < 0:
                    self._close_arrived()
            except (OSError, ChannelError):
                sock.close()
            finally:
                self._handshakes.release()

        try:
            start_thread(threading.Thread(target=greet, name="tpengine-handshake", daemon=True))
        except (RuntimeError, MemoryError):  # the rank tries again
            sock.close()
            self._handshakes.release()

    def _close_arrived(self) -> None:
        """Closes the channels that `accept` has not taken."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()[1].close()

    def close(self) -> None:
        """Stops listening, also to ranks that still connect; accepted channels stay open."""
        self._sock.close()
        self._close_arrived()


def connect(
    address: tuple[str, int], secret: bytes, rank: int, epoch: int, timeout_s: float, index: int = 0
) -> Channel:
    """Connects a rank to its driver. A handshake that fails, as on a busy machine, is repeated.

    Args:
        index: tells the channels of a rank apart.

    Raises:
        ChannelError: the driver cannot be reached, or does not know the secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(address, secret, (rank, epoch, index), deadline)
        except (ChannelClosedError, ChannelTimeoutError) as error:
            if time.monotonic() + _RETRY_S > deadline:
                where = f"{address[0]}:{address[1]}"
                raise ChannelError(f"no handshake with {where}: {error}") from error
        time.sleep(_RETRY_S)


def _connect_once(
    address: tuple[str, int], secret: bytes, name: tuple[int, int, int], deadline: float
) -> Channel:
    """The rank's side of the handshake; `name` is (rank, epoch, index)."""
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, max(_RETRY_S, deadline - time.monotonic()))
    except OSError as error:
        raise ChannelError(f"cannot reach the driver at {where}: {error}") from error
    try:
        _tune(sock)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock = secured(sock, is_driver=False)
        challenge = _receive_exactly(sock, _CHALLENGE_BYTES, deadline)
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        proof = _proof(secret, b"rank", challenge + own, name)
        sock.sendall(_HELLO.pack(_MAGIC, *name, own, proof))
        answer = _receive_exactly(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(answer, _proof(secret, b"driver", own + challenge, name)):
            raise ChannelError(f"{where} does not know the group's secret")
    except OSError as error:
        sock.close()
        raise ChannelClosedError(str(error)) from error
    except ChannelError:
        sock.close()
        raise
    return Channel(end_of(sock))


def _greet_rank(sock: socket.socket, secret: bytes, epoch: int) -> tuple[tuple[int, int], Channel]:
    """The driver's side of the handshake; returns ((rank, index), channel)."""
    _tune(sock)
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    sock = secured(sock, is_driver=True)
    sock.sendall(challenge)
    hello = _receive_exactly(sock, _HELLO.size, deadline)
    magic, rank, rank_epoch, index, theirs, proof = _HELLO.unpack(hello)
    name = (rank, epoch, index)
    expected = _proof(secret, b"rank", challenge + theirs, name)
    if magic != _MAGIC or rank_epoch != epoch or not hmac.compare_digest(proof, expected):
        raise ChannelError("the peer does not know the group's secret")
    sock.sendall(_proof(secret, b"driver", theirs + challenge, name))
    return (rank, index), Channel(end_of(sock))


def _proof(secret: bytes, side: bytes, challenges: bytes, name: tuple[int, int, int]) -> bytes:
    """The HMAC names its side, so that a peer cannot send back the proof that it received."""
    return hmac.digest(secret, side + challenges + struct.pack("<III", *name), "sha256")


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
