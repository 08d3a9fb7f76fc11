"""Chooses how the ranks of a group exchange tensors, and connects them.

CPU ranks of one host use shared memory; others gloo; ranks on GPUs NCCL. torch's process groups are
made as objects and never registered with it: engines in one process do not touch each other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tpengine import envs
from tpengine.distributed.parallel_state import Collectives, ParallelState
from tpengine.distributed.rendezvous import Meeting, RendezvousStore, interface_of
from tpengine.distributed.shared_memory import (
    CAPACITY_BYTES,
    SegmentFile,
    SharedMemoryCollectives,
    find_segment_file,
)
from tpengine.errors import CollectiveError, RendezvousError, SharedMemoryError
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous
from tpengine.ops.shared_memory import Segment, has_shared_memory, segment_bytes

logger = init_logger(__name__)

_DIVIDED_SUM_BYTES = 65536
"""From here on ranks sum a part each and exchange the sums: less traffic, one more round trip."""


def connect_ranks(
    rank: int, rendezvous: Rendezvous, device: torch.device, master: RendezvousStore | None
) -> tuple[ParallelState, str]:
    """Connects this rank with the others; all of them call this at the same time.

    Args:
        master: the store, at rank 0.

    Returns:
        The rank's place among the others, and a line that says how they are connected.

    Raises:
        RendezvousError: ranks did not arrive, failed, or cannot reach each other.
        SharedMemoryError: all ranks are on one host, whose shared memory is too small.
    """
    meeting = Meeting(rank, rendezvous, master)
    timeout_s = rendezvous.collective_timeout_s
    collectives: Collectives
    num_bytes = 0  # gloo's buffers are its sockets', which the kernel holds
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        collectives, how = NcclCollectives(meeting, device, timeout_s), "NCCL"
        num_bytes = max(0, free_bytes - torch.cuda.mem_get_info(device)[0])
    elif (segment := _connect_segment(meeting, rendezvous)) is not None:
        collectives, how = SharedMemoryCollectives(segment, rank, timeout_s), "shared memory"
        num_bytes = segment_bytes(meeting.size, CAPACITY_BYTES) // meeting.size
    else:
        collectives, how = GlooCollectives(meeting, timeout_s), "gloo"
    interface = interface_of(meeting.address) or "unknown"
    line = f"rank {rank} of {meeting.size} at {meeting.address} (interface {interface}) by {how}"
    return ParallelState(rank, meeting.size, collectives, num_bytes), line


def _connect_segment(meeting: Meeting, rendezvous: Rendezvous) -> Segment | None:
    """The segment that all ranks share; None: they do not see the same memory.

    That host names or addresses agree proves nothing (containers), so each rank looks for the file
    that rank 0 has just made.
    """
    file = _offer_file(rendezvous) if meeting.rank == 0 else None
    fd = None
    try:
        if meeting.rank == 0:
            where = file and {"path": str(file.path), "token": file.token.hex()}
            meeting.publish("segment", json.dumps(where).encode())
        offer = json.loads(meeting.read("segment", 0))
        if offer is not None and has_shared_memory():
            fd = find_segment_file(Path(offer["path"]), bytes.fromhex(offer["token"]))
        seen = meeting.exchange("seen", b"" if fd is None else b"1")
        if fd is None or not all(seen):
            return None
        if file is not None:
            _allocate(meeting, file)
        meeting.read("allocated", 0)
        own_fd, fd = fd, None  # the segment's from now on
        segment = _attach(meeting, own_fd)
        try:
            meeting.exchange("attached", b"")
        except RendezvousError:
            segment.close()
            raise
        return segment
    finally:
        if fd is not None:
            os.close(fd)
        if file is not None:
            file.remove()
            os.close(file.fd)


def _offer_file(rendezvous: Rendezvous) -> SegmentFile | None:
    if not has_shared_memory():
        return None
    try:
        return SegmentFile(rendezvous.engine_id, rendezvous.epoch)
    except OSError as error:
        logger.warning("no shared memory for the ranks of this host: %s", error)
        return None


def _allocate(meeting: Meeting, file: SegmentFile) -> None:
    try:
        file.allocate(meeting.size, CAPACITY_BYTES)
    except SharedMemoryError as error:
        meeting.fail("allocated", error)
        raise
    meeting.publish("allocated", b"")


def _attach(meeting: Meeting, fd: int) -> Segment:
    try:
        return Segment(fd, meeting.rank, meeting.size, CAPACITY_BYTES)
    except OSError as cause:
        error = SharedMemoryError(
            f"rank {meeting.rank} cannot map the shared memory of its group: {cause}; raise its "
            "limit of memory (ulimit -v, cgroup)"
        )
        meeting.fail("attached", error)
        raise error from cause


class _TorchCollectives:
    """What gloo and NCCL have in common: bounded waits, and errors that name the operation."""

    def __init__(self, group: dist.Backend, meeting: Meeting, timeout_s: float) -> None:
        self._group = group
        self._rank, self._size = meeting.rank, meeting.size
        self._timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        return torch.cat(list(self._gather_parts("all_gather", x).unbind()), dim=-1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same at rank 0; elsewhere None. (Here the others get it too, and drop it.)"""
        parts = self._gather_parts("gather", x)
        return torch.cat(list(parts.unbind()), dim=-1) if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, in place where `x` is contiguous."""
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._run("broadcast", x, lambda: self._group.broadcast([_bytes(x)], options))
        return x

    def abandon(self) -> None:
        """Breaks the connections, which the others see as this rank's death."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def close(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()

    def _gather_parts(self, operation: str, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape], on every rank."""
        x = x.contiguous()
        parts = x.new_empty(self._size, *x.shape)
        self._run(operation, x, lambda: self._group._allgather_base(_bytes(parts), _bytes(x)))
        return parts

    def _run(self, operation: str, x: torch.Tensor, start: Callable[[], dist.Work]) -> None:
        if x.numel() == 0:
            return
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            # With two ranks it is clear who is meant.
            failed = 1 - self._rank if self._size == 2 else None
            name = "a peer" if failed is None else f"rank {failed}"
            raise CollectiveError(
                f"{operation} of {x.nbytes} bytes at rank {self._rank}: {name} is gone or did not "
                f"arrive within {self._timeout_s:g} s ({error})",
                failed,
            ) from error


class GlooCollectives(_TorchCollectives):
    """See `Collectives`; CPU ranks of several hosts.

    Sums are taken as over shared memory (in rank order and float32), so that a model's tokens do
    not depend on where its ranks are. gloo listens on the node's address, not on what the host's
    name resolves to. A call that waits for a frozen peer ends at the timeout only.
    """

    def __init__(self, meeting: Meeting, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=meeting.left_s)
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=meeting.address)
            options._devices = [device]
            group = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", meeting.store), meeting.rank, meeting.size, options
            )
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {meeting.rank} ({meeting.address}, interface "
                f"{interface_of(meeting.address) or 'unknown'}) could not connect with all other "
                f"ranks by gloo: {error}; every node must reach every other's address"
            ) from error
        group._set_default_timeout(datetime.timedelta(seconds=timeout_s))
        super().__init__(group, meeting, timeout_s)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        if self._size == 2 or x.nbytes < _DIVIDED_SUM_BYTES:
            return _sum(self._gather_parts("all_reduce", x)).to(x.dtype)
        share = -(-x.numel() // self._size)
        flat = x.new_zeros(self._size, share)
        flat.view(-1)[: x.numel()] = x.flatten()
        parts = torch.empty_like(flat)
        self._run(
            "all_reduce",
            x,
            lambda: self._group.alltoall_base(
                _bytes(parts), _bytes(flat), [], [], dist.AllToAllOptions()
            ),
        )
        sums = self._gather_parts("all_reduce", _sum(parts).to(x.dtype))
        return sums.view(-1)[: x.numel()].view(x.shape)


class NcclCollectives(_TorchCollectives):
    """See `Collectives`; ranks on GPUs. Written after NCCL's documentation and untested: there was
    no machine with two GPUs. A CUDA error, and NCCL's own watchdog, end the process."""

    def __init__(self, meeting: Meeting, device: torch.device, timeout_s: float) -> None:
        interface = interface_of(meeting.address)
        if interface is not None:
            envs.set_nccl_interface(interface)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = dist.PrefixStore("nccl", meeting.store)
            group = dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
            super().__init__(group, meeting, timeout_s)
            self.all_reduce(torch.zeros(1, device=device))  # connects
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {meeting.rank} ({meeting.address}, interface {interface or 'unknown'}) "
                f"could not connect with all other ranks by NCCL: {error}"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in NCCL's order, in place where `x` is contiguous."""
        x = x.contiguous()
        self._run("all_reduce", x, lambda: self._group.allreduce([x], dist.AllreduceOptions()))
        return x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, flat: gloo knows no bfloat16."""
    # A lone element may have any stride and still count as contiguous.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """parts `[num_ranks, ...]` summed one after another in float32."""
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total
