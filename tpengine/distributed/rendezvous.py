"""How the ranks of a group find each other: through a small store at rank 0.

Rank 0 binds a port that the kernel chooses, only on its node's address, and its caller passes the
number to the other ranks. The store has no authentication: it is meant for a trusted network, and
is closed as soon as the ranks are connected.
"""

from __future__ import annotations

import copy
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
"""For the store's connection to itself, and for writes."""


def make_store(address: str) -> dist.TCPStore:
    """Starts the store in rank 0's process, at a port that the kernel chooses; it is closed when
    the object is deleted.

    Raises:
        RendezvousError: the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot listen on {address}: {error}; it must be an address of its own node"
        ) from error
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # closed by the store
        use_libuv=True,
    )


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this IPv4 address; None: not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class Meeting:
    """The values that ranks exchange while they connect, by phase and rank.

    Args:
        master: the store at rank 0; None at the other ranks.

    Attributes:
        store: with a prefix that only these ranks use.
        ranks: their numbers among the ranks of all stages.
        addresses: of their nodes.
        collective_timeout_s: limit of each exchange after the meeting.

    Raises:
        RendezvousError: rank 0's store cannot be reached.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous, master: dist.TCPStore | None) -> None:
        self.rank, self.size = rank, len(rendezvous.addresses)
        self.ranks = range(self.size)
        self._rendezvous = rendezvous
        self.addresses = rendezvous.addresses
        self.collective_timeout_s = rendezvous.collective_timeout_s
        self._deadline = time.monotonic() + rendezvous.connect_timeout_s
        prefix = f"{rendezvous.engine_id}/{rendezvous.epoch}"
        self.store = dist.PrefixStore(prefix, self._join() if master is None else master)

    def among(self, ranks: range, name: str) -> Meeting:
        """Returns the meeting of some of the ranks, of which this is one; they count from 0 in it.

        Args:
            name: unique among those of this rank.
        """
        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.ranks = ranks
        part.addresses = [self.addresses[rank] for rank in ranks]
        part.store = dist.PrefixStore(name, self.store)
        return part

    @property
    def number(self) -> int:
        """This rank's among the ranks of all stages."""
        return self.ranks[self.rank]

    @property
    def address(self) -> str:
        """Address of this rank's node."""
        return self.addresses[self.rank]

    @property
    def left_s(self) -> float:
        """Seconds left to connect, at least 0.01."""
        return max(0.01, self._deadline - time.monotonic())

    def publish(self, phase: str, value: bytes) -> None:
        """Stores this rank's value of a phase.

        Raises:
            RendezvousError: rank 0's store is gone.
        """
        try:
            # torch's stub declares str only; a store takes bytes as well. No value is empty.
            self.store.set(f"{phase}/{self.rank}", b"=" + value)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._lost_store(phase, error) from error

    def read(self, phase: str, rank: int) -> bytes:
        """Returns a rank's value of a phase, and waits for it.

        Raises:
            RendezvousError: the rank did not arrive in time.
        """
        key = f"{phase}/{rank}"
        where = f"rank {self.ranks[rank]} ({self.addresses[rank]})"
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.left_s))
            value = bytes(self.store.get(key))
        except RuntimeError as error:
            if not isinstance(error, dist.DistStoreError):
                raise self._lost_store(phase, error) from error
            raise RendezvousError(
                f"{self._at(phase)} waited for {where}, which did not arrive within "
                f"{self._rendezvous.connect_timeout_s:g} s of the start; look at its log",
                self.ranks[rank],
            ) from error
        return value[1:]  # see `publish`

    def exchange(self, phase: str, value: bytes) -> list[bytes]:
        """Stores this rank's value and returns the values of all ranks, in rank order."""
        self.publish(phase, value)
        return [self.read(phase, rank) for rank in range(self.size)]

    def part(self) -> None:
        """Ends the meeting: at rank 0 returns when no other rank needs its store any more.

        Raises:
            RendezvousError: see `read`.
        """
        if self.rank:
            self.publish("parted", b"")
        else:
            for rank in range(1, self.size):
                self.read("parted", rank)

    def _at(self, phase: str) -> str:
        return f"rank {self.number} ({self.address}) at phase '{phase}'"

    def _lost_store(self, phase: str, error: RuntimeError) -> RendezvousError:
        return RendezvousError(f"{self._at(phase)} lost rank 0's store: {error}", 0)

    def _join(self) -> dist.TCPStore:
        address, port = self.addresses[0], self._rendezvous.port
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
