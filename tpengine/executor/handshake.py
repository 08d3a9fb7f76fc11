"""How driver and rank make sure of each other before anything else is said.

Both ends prove that they know the group's secret: each answers the other's random challenge with an
HMAC over it, the rank's number and the group's epoch.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from tpengine.executor.transport import (
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

    def accept(
        self, size: int, timeout_s: float, check: Callable[[], None] = _go_on
    ) -> list[Channel]:
        """The channels of ranks 0 to `size` - 1, in this order.

        Strangers are turned away; each handshake has a thread, so that none holds up the others.

        Args:
            check: called again and again while ranks are missing; what it raises ends the wait.

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
                check()
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
        sock.sendall(_HELLO.pack(MAGIC, rank, epoch, own, proof))
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
