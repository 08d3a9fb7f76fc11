"""How the ranks of a pipeline's stages are connected: hidden states go to the rank of the same
number in the next stage, sampled ids from the last stage to all others.

Each link is a TCP connection between two ranks. If both see the same memory, hidden states lie in
slots of it, and the connection only says that one is full, or free again. Otherwise a thread sends
them, so that the next step does not wait for a slow wire. GPUs exchange them by NCCL.
"""

from __future__ import annotations

import contextlib
import enum
import json
import mmap
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator

import torch

from tpengine import host
from tpengine.distributed import shared_memory
from tpengine.distributed.parallel_state import Collectives, Link
from tpengine.distributed.rendezvous import Meeting
from tpengine.errors import CollectiveError, RendezvousError, SharedMemoryError
from tpengine.logger import init_logger

logger = init_logger(__name__)

_NUM_SLOTS = 2
"""Messages that the sender may be ahead of the receiver."""
_HEAD = struct.Struct("<q")
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}siii")
"""Token of the listener, rank, kind, and bytes of the offer of memory that follows."""
_HELLO_S = 5.0
"""How long a rank that has connected may take to say which one it is."""
_LONGEST_S = 3600.0
"""Longest wait for another stage, which has all its work to do first. The driver's deadline of the
step ends such a wait earlier, as the loss of a rank does, which closes its connections."""
_KEEP_ALIVE_S = 60
_TAKEN, _NOT_TAKEN = b"\1", b"\0"
_FREE = b"\1"
_DATA_OFFSET = 4096
"""The memory begins with the token of `shared_memory.find_segment`."""


class SocketLink(Link):
    """A connection to another rank; sends and receives by the calling thread.

    Args:
        here, there: numbers of this rank and the other one, among all stages.
    """

    name = "sockets"

    def __init__(self, sock: socket.socket, here: int, there: int, timeout_s: float) -> None:
        self._sock = sock
        self._here, self._there = here, there
        self._timeout_s = timeout_s

    def send(self, x: torch.Tensor) -> None:
        """See `Link`."""
        data = _bytes(x)
        self._send_all(_HEAD.pack(len(data)), data)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """See `Link`."""
        data = out if out.is_cpu else torch.empty_like(out, device="cpu")
        self._receive_head(data.nbytes)
        self._fill(_bytes(data).numpy().data)
        return data if data is out else out.copy_(data)

    def close(self) -> None:
        """See `Link`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the waits of other threads, too
        self._sock.close()

    def _send_all(self, head: bytes, data: torch.Tensor | None = None) -> None:
        with self._failures("was sent nothing"):
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(head)
            if data is not None:
                self._sock.sendall(data.numpy().data)

    def _receive_head(self, wanted: int) -> None:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        (size,) = _HEAD.unpack(head)
        if size != wanted:
            text = f"rank {self._there} sent {size} bytes, rank {self._here} expected {wanted}"
            raise CollectiveError(f"{text}: ranks must run the same steps in the same order")

    def _fill(self, target: memoryview) -> None:
        """Receives exactly as many bytes as fit."""
        with self._failures("sent nothing"):
            _fill(self._sock, target, self._timeout_s)

    @contextlib.contextmanager
    def _failures(self, late: str) -> Iterator[None]:
        """Raises failures of the connection as those of the other rank."""
        try:
            yield
        except TimeoutError as error:
            why = f"{late} within {self._timeout_s:g} s; it is frozen, or busy for longer"
            raise self._failure(why) from error
        except OSError as error:
            raise self._failure(f"has died or left the pipeline ({error})") from error

    def _failure(self, why: str) -> CollectiveError:
        text = f"rank {self._here} in a pipeline: rank {self._there} {why}"
        return CollectiveError(text, self._there)


class MemoryLink(SocketLink):
    """A link whose messages lie in memory that both sides map.

    Args:
        memory: uint8 `[_NUM_SLOTS, slot_bytes]`.
    """

    name = "shared memory"

    def __init__(
        self,
        sock: socket.socket,
        here: int,
        there: int,
        timeout_s: float,
        memory: torch.Tensor,
    ) -> None:
        super().__init__(sock, here, there, timeout_s)
        self._memory = memory
        self._number = 0
        self._num_free = _NUM_SLOTS

    def send(self, x: torch.Tensor) -> None:
        """See `Link`; waits if the other side is as far behind as there are slots."""
        if not self._num_free:
            freed = bytearray(1)
            self._fill(memoryview(freed))
            self._num_free += 1
        data = _bytes(x)
        self._next_slot(len(data)).copy_(data)
        self._num_free -= 1
        self._send_all(_HEAD.pack(len(data)))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """See `Link`."""
        self._receive_head(out.nbytes)
        out.copy_(self._next_slot(out.nbytes).view(out.dtype).view(out.shape))
        self._send_all(_FREE)
        return out

    def _next_slot(self, size: int) -> torch.Tensor:
        slot = self._memory[self._number % _NUM_SLOTS]
        self._number += 1
        return slot[:size]


class QueuedLink(SocketLink):
    """A link whose messages a thread sends."""

    def __init__(self, sock: socket.socket, here: int, there: int, timeout_s: float) -> None:
        super().__init__(sock, here, there, timeout_s)
        self._queue: queue.Queue[torch.Tensor | None] = queue.Queue(_NUM_SLOTS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tpengine-stage", daemon=True)
        host.start_thread(self._thread)

    def send(self, x: torch.Tensor) -> None:
        """See `Link`; waits if too many messages are on their way."""
        if self._error is None:
            try:
                self._queue.put(x.detach().clone().cpu(), timeout=self._timeout_s)
            except queue.Full:
                self._error = self._failure(f"took nothing for {self._timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """See `Link`."""
        super().close()
        with contextlib.suppress(queue.Full):  # then the thread ends by the closed connection
            self._queue.put_nowait(None)

    def _run(self) -> None:
        try:
            while (x := self._queue.get()) is not None:
                super().send(x)
        except Exception as error:  # `send` raises it
            self._error = error


class DeviceLink(Link):
    """A link between two ranks whose collectives move tensors from device to device.

    Args:
        pair: of the two; the sender is rank 0.
    """

    name = "NCCL"

    def __init__(self, pair: Collectives) -> None:
        self._pair = pair

    def send(self, x: torch.Tensor) -> None:
        """See `Link`."""
        self._pair.broadcast(x)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """See `Link`."""
        return self._pair.broadcast(out)

    def abandon(self) -> None:
        """See `Link`."""
        self._pair.abandon()

    def close(self) -> None:
        """See `Link`."""
        self._pair.close()


class Kind(enum.IntEnum):
    """What a connection carries."""

    HIDDEN = 0
    SAMPLED = 1


Key = tuple[int, Kind]
"""The rank on the other side, and what the connection carries."""


class Connections:
    """The connections of one rank with ranks of other stages, while they are made: the rank that
    sends connects to the one that receives, which has published where it listens.

    Attributes:
        num_bytes: memory of links, counted at the rank that sends.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._opened: dict[Key, tuple[socket.socket, torch.Tensor | None]] = {}
        self._files: list[int] = []
        self.num_bytes = 0
        family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server((meeting.address, 0), family=family)
        own = [self._listener.getsockname()[1], self._token.hex()]
        meeting.publish("stage", json.dumps(own).encode())

    def open(self, other: int, kind: Kind, memory_bytes: int = 0) -> None:
        """Connects to a rank that receives.

        Args:
            memory_bytes: of memory that is offered for the messages; 0: none.
        """
        port, token = json.loads(self._meeting.read("stage", other))
        memory, offer = None, b""
        if memory_bytes:
            memory, offer = self._offered(memory_bytes)
        hello = bytes.fromhex(token), self._meeting.rank, kind, len(offer)
        address = self._meeting.addresses[other]
        try:
            sock = _tuned(socket.create_connection((address, port), self._meeting.left_s))
            self._opened[other, kind] = sock, memory
            sock.sendall(_HELLO.pack(*hello) + offer)
        except OSError as error:
            raise self._missing(f"rank {other} at {address}:{port}", error, other) from error

    def accept(self, count: int) -> dict[Key, SocketLink]:
        """Waits for connections of ranks that send; returns their links."""
        links: dict[Key, SocketLink] = {}
        while len(links) < count:
            self._listener.settimeout(self._meeting.left_s)
            try:
                sock = _tuned(self._listener.accept()[0])
            except OSError as error:
                raise self._missing("other stages", error) from error
            try:
                head = _read(sock, _HELLO.size, _HELLO_S)
                token, other, kind, size = _HELLO.unpack(head)
                offer = _read(sock, size, _HELLO_S) if token == self._token else b""
            except OSError:  # no rank, or one that has ended
                token = b""
            if token != self._token:
                sock.close()
                continue
            memory = _find(offer)
            try:
                sock.sendall(_TAKEN if memory is not None else _NOT_TAKEN)
            except OSError as error:
                raise self._missing(f"rank {other}", error, other) from error
            links[other, Kind(kind)] = self._link(sock, other, memory)
        return links

    def settle(self) -> dict[Key, SocketLink]:
        """Returns the links that this rank has opened, when the other sides have taken them."""
        links: dict[Key, SocketLink] = {}
        for (other, kind), (sock, memory) in self._opened.items():
            try:
                is_taken = _read(sock, 1, self._meeting.left_s) == _TAKEN
            except OSError as error:
                raise self._missing(f"rank {other}", error, other) from error
            if memory is not None and is_taken:
                self.num_bytes += memory.nbytes
            is_queued = kind is Kind.HIDDEN
            links[other, kind] = self._link(sock, other, memory if is_taken else None, is_queued)
        self._opened.clear()
        return links

    def close(self) -> None:
        """Stops listening, and closes what was opened and not settled."""
        self._listener.close()
        for sock, _ in self._opened.values():
            sock.close()
        for file in self._files:
            os.close(file)

    def _link(
        self, sock: socket.socket, other: int, memory: torch.Tensor | None, is_queued: bool = False
    ) -> SocketLink:
        place = sock, self._meeting.rank, other, _LONGEST_S
        if memory is not None:
            return MemoryLink(*place, memory)
        return QueuedLink(*place) if is_queued else SocketLink(*place)

    def _missing(self, who: str, error: OSError, rank: int | None = None) -> RendezvousError:
        return RendezvousError(
            f"rank {self._meeting.rank} ({self._meeting.address}) cannot connect with {who} for a "
            f"pipeline: {error}; every node must reach every other's address",
            rank,
        )

    def _offered(self, memory_bytes: int) -> tuple[torch.Tensor | None, bytes]:
        """Makes memory for the messages to one rank; returns it, and how the rank finds it."""
        try:
            size = _DATA_OFFSET + _NUM_SLOTS * memory_bytes
            made = shared_memory.make_memory(size, "two stages")
        except SharedMemoryError as error:
            logger.warning(
                "hidden states pass sockets, more slowly, until the next start: %s", error
            )
            return None, b""
        self._files.append(made[1])
        return _mapped(made[1], memory_bytes), json.dumps([*made, memory_bytes]).encode()


def _read(sock: socket.socket, count: int, timeout_s: float) -> bytes:
    data = bytearray(count)
    _fill(sock, memoryview(data), timeout_s)
    return bytes(data)


def _fill(sock: socket.socket, target: memoryview, timeout_s: float) -> None:
    """Receives exactly as many bytes as fit.

    Raises:
        OSError: the other side closed the connection, or has not sent them in time.
    """
    deadline, count = time.monotonic() + timeout_s, 0
    while count < len(target):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        received = sock.recv_into(target[count:])
        if not received:
            raise ConnectionResetError("it closed the connection")
        count += received


def _tuned(sock: socket.socket) -> socket.socket:
    """Sends small messages at once, and tells a firewall that an idle connection is in use."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
    return sock


def _find(offer: bytes) -> torch.Tensor | None:
    """Maps the memory that a rank offers; None: it offers none, or this process does not see it."""
    if not offer:
        return None
    *place, memory_bytes = json.loads(offer)
    fd = shared_memory.find_segment(*place)
    if fd is None:
        return None
    try:
        return _mapped(fd, memory_bytes)
    finally:
        os.close(fd)


def _mapped(fd: int, memory_bytes: int) -> torch.Tensor:
    mapping = mmap.mmap(fd, _DATA_OFFSET + _NUM_SLOTS * memory_bytes)
    data = torch.frombuffer(mapping, dtype=torch.uint8, offset=_DATA_OFFSET)
    return data.view(_NUM_SLOTS, memory_bytes)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as flat uint8, on the host."""
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)
