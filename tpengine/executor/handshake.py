"""How driver and rank make sure of each other before anything else is said.

Both ends prove that they know the group's secret: each answers the other's random challenge with an
HMAC over it, the rank's number and the group's epoch.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from tpengine.executor.channel import (
    MAGIC,
    Channel,
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
)

HANDSHAKE_TIMEOUT_S = 2.0
_HELLO = struct.Struct("<4sII32s32s")  # magic, rank, epoch, challenge, proof
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_KEEP_ALIVE = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3))  # s, s, probes
_USER_TIMEOUT_MS = 3000
"""How long sent bytes may stay unacknowledged: a lost link, not a busy peer, as the kernel answers
for that."""
_MAX_HANDSHAKES = 64
_LOOK_S = 0.01
_RETRY_S = 0.1


class RanksMissingError(ChannelTimeoutError):
    """Ranks did not connect.

    Attributes:
        ranks: their numbers.
    """

    def __init__(
        self, ranks: Sequence[int], addresses: Sequence[tuple[str, int]], timeout_s: float
    ) -> None:
        named = " and ".join(f"{host}:{port}" for host, port in addresses)
        super().__init__(
            f"ranks {list(ranks)} did not connect to {named} within {timeout_s:.0f} s; is that "
            "address reachable from their nodes?"
        )
        self.ranks = list(ranks)


def _go_on() -> None:
    """What a wait that nobody interrupts calls."""


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
        self._arrived: queue.SimpleQueue[tuple[int, Channel]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def accept(
        self, size: int, timeout_s: float, check: Callable[[], None] = _go_on
    ) -> list[Channel]:
        """The channels of ranks 0 to `size` - 1, in this order; see `accept_all`."""
        return accept_all([self], size, timeout_s, check)[0]

    def fileno(self) -> int:
        """For `poll`: readable when somebody knocks."""
        return self._sock.fileno()

    def greet(self) -> None:
        """Takes who knocks; the handshake has a thread, so that none holds up the others."""
        self._sock.settimeout(0.0)
        try:
            sock, _ = self._sock.accept()
        except OSError:  # gone again
            return
        if not self._handshakes.acquire(blocking=False):
            sock.close()
            return

        def greet() -> None:
            try:
                self._arrived.put(_greet_rank(sock, self._secret, self._epoch))
            except (OSError, ChannelError):
                sock.close()
            finally:
                self._handshakes.release()

        threading.Thread(target=greet, name="tpengine-handshake", daemon=True).start()

    def collect(self, channels: dict[int, Channel], size: int) -> None:
        """Adds the channels of ranks that arrived; a rank that came again gave up the first."""
        with contextlib.suppress(queue.Empty):
            while True:
                rank, channel = self._arrived.get_nowait()
                if rank >= size:
                    channel.close()
                    continue
                if rank in channels:
                    channels[rank].close()
                channels[rank] = channel

    def close(self) -> None:
        """No more connections; those that were accepted stay."""
        self._sock.close()


def accept_all(
    listeners: Sequence[Listener],
    size: int,
    timeout_s: float,
    check: Callable[[], None] = _go_on,
) -> list[list[Channel]]:
    """Each listener's channels of ranks 0 to `size` - 1, in this order. Strangers are turned away.

    All are served at once: a rank goes from one to the next as soon as it is known there, however
    late the others come.

    Args:
        check: called again and again while ranks are missing; what it raises ends the wait.

    Raises:
        RanksMissingError: the message names them.
    """
    deadline = time.monotonic() + timeout_s
    found: list[dict[int, Channel]] = [{} for _ in listeners]
    poll = select.poll()
    for listener in listeners:
        poll.register(listener.fileno(), select.POLLIN)
    try:
        while missing := {rank for rank in range(size) for known in found if rank not in known}:
            check()
            if time.monotonic() > deadline:
                raise RanksMissingError(
                    sorted(missing), [one.address for one in listeners], timeout_s
                )
            # A moment only: what handshakes bring does not wake it.
            knocked = {fileno for fileno, _ in poll.poll(_LOOK_S * 1e3)}
            for listener, known in zip(listeners, found, strict=True):
                if listener.fileno() in knocked:
                    listener.greet()
                listener.collect(known, size)
    except BaseException:
        for known in found:
            for channel in known.values():
                channel.close()
        raise
    return [[known[rank] for rank in range(size)] for known in found]


def connect(
    address: tuple[str, int], secret: bytes, rank: int, epoch: int, timeout_s: float
) -> Channel:
    """Connects a rank to its driver; a handshake that a busy machine let fail is tried again.

    Raises:
        ChannelError: the driver cannot be reached, or does not know the secret.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(address, secret, rank, epoch, deadline)
        except (ChannelClosedError, ChannelTimeoutError) as error:
            if time.monotonic() + _RETRY_S > deadline:
                where = f"{address[0]}:{address[1]}"
                raise ChannelError(f"no handshake with {where}: {error}") from error
        time.sleep(_RETRY_S)


def _connect_once(
    address: tuple[str, int], secret: bytes, rank: int, epoch: int, deadline: float
) -> Channel:
    where = f"{address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, max(_RETRY_S, deadline - time.monotonic()))
    except OSError as error:
        raise ChannelError(f"cannot reach the driver at {where}: {error}") from error
    try:
        _tune(sock)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        challenge = _receive_exactly(sock, _NONCE_BYTES, deadline)
        own = secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(secret, b"rank", challenge, own, rank, epoch)
        sock.sendall(_HELLO.pack(MAGIC, rank, epoch, own, proof))
        answer = _receive_exactly(sock, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(answer, _proof(secret, b"driver", own, challenge, rank, epoch)):
            raise ChannelError(f"{where} does not know the group's secret")
    except OSError as error:
        sock.close()
        raise ChannelClosedError(str(error)) from error
    except ChannelError:
        sock.close()
        raise
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
    if magic != MAGIC or rank_epoch != epoch or not hmac.compare_digest(proof, expected):
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
