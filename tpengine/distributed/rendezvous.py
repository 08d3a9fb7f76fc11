"""How the ranks of a group find each other: through a small store at rank 0.

Rank 0 binds a port that the kernel chooses, on its node's address alone, and its caller publishes
the number: nobody guesses a port. The store knows no authentication; it is made for a trusted
network, and it is closed once the ranks are connected.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import socket
import struct
import time

import torch.distributed as dist

from tpengine.errors import RendezvousError
from tpengine.messages import Rendezvous

_SIOCGIFADDR = 0x8915
_STORE_TIMEOUT = datetime.timedelta(seconds=10)
"""Of the store's connection to itself, and of writing to it."""
_ERROR = b"!"
"""First byte of a value that says why a rank cannot go on."""


class RendezvousStore:
    """The store, in rank 0's process, for as long as the object lives.

    Attributes:
        port: chosen by the kernel.

    Raises:
        RendezvousError: the address is none of this machine's.
    """

    def __init__(self, address: str) -> None:
        listener, self.port = _listen(address)
        self.store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # closed by the store
            use_libuv=True,
        )


def _listen(address: str) -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"rank 0 cannot listen on {address}: {error}; it must be an address of its own node"
        ) from error
    return listener, int(listener.getsockname()[1])


def interface_of(address: str) -> str | None:
    """Name of the network interface that owns an IPv4 address; None: not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class Meeting:
    """What the ranks tell each other while they connect.

    Args:
        master: the store, at rank 0.

    Attributes:
        store: shared by this group alone.

    Raises:
        RendezvousError: rank 0's store cannot be reached.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, master: RendezvousStore | None) -> None:
        self.rank, self.size = rank, len(rendezvous.addresses)
        self._rendezvous = rendezvous
        self._deadline = time.monotonic() + rendezvous.connect_timeout_s
        tcp_store = self._join() if master is None else master.store
        prefix = f"{rendezvous.engine_id}/{rendezvous.epoch}"
        self.store = dist.PrefixStore(prefix, tcp_store)

    @property
    def address(self) -> str:
        """Of this rank's node."""
        return self._rendezvous.addresses[self.rank]

    @property
    def left_s(self) -> float:
        """Seconds until the time for connecting is over; at least a moment."""
        return max(0.01, self._deadline - time.monotonic())

    def publish(self, phase: str, value: bytes) -> None:
        """Says what this rank has to say in a phase.

        Raises:
            RendezvousError: there is nobody to say it to any more.
        """
        self._say(phase, b"=" + value)

    def fail(self, phase: str, error: Exception) -> None:
        """Says instead why this rank cannot go on; the others raise it."""
        with contextlib.suppress(RendezvousError):  # rank 0 is gone; the error is still its own
            self._say(phase, _ERROR + f"{type(error).__name__}: {error}".encode())

    def read(self, phase: str, rank: int) -> bytes:
        """What a rank said in a phase.

        Raises:
            RendezvousError: it was not there in time, or it failed.
        """
        key = f"{phase}/{rank}"
        where = f"rank {rank} ({self._rendezvous.addresses[rank]})"
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.left_s))
            value = bytes(self.store.get(key))
        except RuntimeError as error:
            if not isinstance(error, dist.DistStoreError):
                raise self._lost_store(phase, error) from error
            raise RendezvousError(
                f"{self._at(phase)} waited for {where}, which did not arrive within "
                f"{self._rendezvous.connect_timeout_s:g} s of the start; look at its log",
                rank,
            ) from error
        if value.startswith(_ERROR):
            raise RendezvousError(f"{where} failed: {value[1:].decode()}", rank)
        return value[1:]

    def exchange(self, phase: str, value: bytes) -> list[bytes]:
        """Publishes, and returns what every rank published, in rank order."""
        self.publish(phase, value)
        return [self.read(phase, rank) for rank in range(self.size)]

    def _say(self, phase: str, value: bytes) -> None:
        try:
            self.store.set(f"{phase}/{self.rank}", value)
        except RuntimeError as error:
            raise self._lost_store(phase, error) from error

    def _at(self, phase: str) -> str:
        return f"rank {self.rank} ({self.address}) at phase '{phase}'"

    def _lost_store(self, phase: str, error: RuntimeError) -> RendezvousError:
        return RendezvousError(f"{self._at(phase)} lost rank 0's store: {error}", 0)

    def _join(self) -> dist.TCPStore:
        address, port = self._rendezvous.addresses[0], self._rendezvous.port
        timeout = datetime.timedelta(seconds=self._rendezvous.connect_timeout_s)
        try:
            return dist.TCPStore(
                address, port, is_master=False, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self.rank} ({self.address}) cannot reach rank 0 at {address}:{port} within "
                f"{self._rendezvous.connect_timeout_s:g} s; rank 0's process must live, and its "
                f"address must be reachable from here",
                0,
            ) from error
