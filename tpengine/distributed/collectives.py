"""Chooses how the ranks of a group exchange tensors, and connects them.

CPU ranks of one host use shared memory; others gloo; ranks on GPUs NCCL, unless some of them share
a card, which NCCL refuses: then gloo, through the host.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tpengine.distributed.parallel_state import Collectives, ParallelState
from tpengine.distributed.rendezvous import Meeting, RendezvousStore, interface_of
from tpengine.distributed.shared_memory import (
    CAPACITY_BYTES,
    SegmentFile,
    SharedMemoryCollectives,
    find_segment_file,
)
from tpengine.distributed.torch_groups import GlooCollectives, HostCollectives, NcclCollectives
from tpengine.errors import RendezvousError, SharedMemoryError
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous
from tpengine.ops.shared_memory import Segment, has_shared_memory, segment_bytes

logger = init_logger(__name__)


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
        collectives, how = _connect_gpus(meeting, device, timeout_s)
        num_bytes = max(0, free_bytes - torch.cuda.mem_get_info(device)[0])
    elif (segment := _connect_segment(meeting, rendezvous)) is not None:
        collectives, how = SharedMemoryCollectives(segment, rank, timeout_s), "shared memory"
        num_bytes = segment_bytes(meeting.size, CAPACITY_BYTES) // meeting.size
    else:
        collectives, how = GlooCollectives(meeting, timeout_s), "gloo"
    interface = interface_of(meeting.address) or "unknown"
    line = f"rank {rank} of {meeting.size} at {meeting.address} (interface {interface}) by {how}"
    return ParallelState(rank, meeting.size, collectives, num_bytes, timeout_s), line


def _connect_gpus(
    meeting: Meeting, device: torch.device, timeout_s: float
) -> tuple[Collectives, str]:
    if share_a_card(meeting, str(torch.cuda.get_device_properties(device).uuid)):
        if meeting.rank == 0:
            logger.warning(
                "ranks share a GPU, which NCCL refuses: they exchange through the host, and run "
                "without CUDA graphs; both are slow. Give each rank a GPU of its own"
            )
        return HostCollectives(GlooCollectives(meeting, timeout_s)), "gloo through the host"
    return NcclCollectives(meeting, device, timeout_s), "NCCL"


def share_a_card(meeting: Meeting, card: str) -> bool:
    """Whether two ranks have the same GPU.

    Args:
        card: what tells this rank's from all others.
    """
    cards = meeting.exchange("card", card.encode())
    return len(set(cards)) < len(cards)


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
