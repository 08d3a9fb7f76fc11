"""How the ranks of a group exchange tensors, and how they connect.

CPU ranks of one host use shared memory (`shared_memory.py`), CPU ranks of several hosts gloo, ranks
on GPUs NCCL. If ranks share a GPU, which NCCL refuses, they use gloo through the host.

torch's process groups are created as objects and not registered with torch, so that engines in one
process do not affect each other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from tpengine import envs
from tpengine.distributed import shared_memory
from tpengine.distributed.parallel_state import Collectives, Link, ParallelState, Stage
from tpengine.distributed.rendezvous import Meeting, interface_of
from tpengine.distributed.shared_memory import CAPACITY_BYTES, SharedMemoryCollectives
from tpengine.distributed.stage_links import Connections, DeviceLink, Kind
from tpengine.errors import CollectiveError, RendezvousError, SharedMemoryError, is_device_fault
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous
from tpengine.ops.shared_memory_ops import has_shared_memory, segment_bytes

logger = init_logger(__name__)

_DIVIDED_SUM_BYTES = 65536
"""From this size on each rank sums one part and the ranks exchange the sums: less traffic, but one
more round trip."""
_Options = TypeVar("_Options", dist.AllreduceOptions, AllgatherOptions, dist.BroadcastOptions)


def connect_ranks(
    rank: int,
    rendezvous: Rendezvous,
    device: torch.device,
    master: dist.TCPStore | None,
    num_stages: int = 1,
    message_bytes: int = 0,
) -> tuple[ParallelState, str]:
    """Connects this rank with the others; all ranks call this at the same time.

    Args:
        master: the store at rank 0; None at the other ranks.
        num_stages: of the pipeline; the ranks of a stage have numbers that follow each other.
        message_bytes: of the largest message between two stages.

    Returns:
        The rank's parallel state, and a line for the log that says how the ranks are connected.

    Raises:
        RendezvousError: a rank did not arrive, failed, or cannot be reached.
    """
    meeting = Meeting(rank, rendezvous, master)
    tp_size = meeting.size // num_stages
    index, tp_rank = divmod(rank, tp_size)
    group, stage, how, num_bytes = None, Stage(), [], 0
    free_bytes = _free_bytes(device)
    if tp_size > 1:
        own = range(index * tp_size, (index + 1) * tp_size)
        part = meeting.among(own, f"stage {index}")
        group, kind, num_bytes = _connect_group(part, device)
        how.append(kind)
    if num_stages > 1:
        stage, links, link_bytes = _connect_stages(meeting, tp_size, device, message_bytes)
        how.append(links)
        num_bytes += link_bytes
        meeting.part()
    num_bytes += max(0, free_bytes - _free_bytes(device))
    timeout_s = rendezvous.collective_timeout_s
    interface = interface_of(meeting.address) or "unknown"
    line = f"rank {rank} of {meeting.size} at {meeting.address} (interface {interface})"
    line = f"{line} by {', '.join(how)}"
    return ParallelState(tp_rank, tp_size, group, num_bytes, timeout_s, stage), line


def _connect_group(meeting: Meeting, device: torch.device) -> tuple[Collectives, str, int]:
    """Connects the ranks that share each layer; returns their collectives, their name, and the
    bytes of host memory that they hold for this rank."""
    if device.type == "cuda":
        if not share_a_card(meeting, _card(device)):
            return NcclCollectives(meeting, device), "NCCL", 0
        if meeting.rank == 0:
            logger.warning(
                "ranks share a GPU, which NCCL refuses: they exchange through the host and run "
                "without CUDA graphs, and both are slow; give each rank its own GPU"
            )
        return GlooCollectives(meeting), "gloo through the host", 0
    segment = _connect_segment(meeting)
    if segment is None:  # gloo buffers only in its sockets, which is memory of the kernel
        return GlooCollectives(meeting), "gloo", 0
    return segment, "shared memory", segment_bytes(meeting.size, CAPACITY_BYTES) // meeting.size


def _free_bytes(device: torch.device) -> int:
    """Of a GPU; 0 of another device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _connect_stages(
    meeting: Meeting, tp_size: int, device: torch.device, message_bytes: int
) -> tuple[Stage, str, int]:
    """Connects this rank with other stages: with the rank of the same number in the stage before
    and in the stage after its own, and with the rank that samples.

    Args:
        meeting: of all ranks.
    """
    rank, last = meeting.rank, meeting.size - tp_size
    before, after = rank - tp_size, rank + tp_size
    source: Link | None = None
    target: Link | None = None
    passes_host = device.type == "cpu" or share_a_card(meeting, _card(device))
    with contextlib.closing(Connections(meeting)) as connections:
        if rank == last:
            for other in range(last):
                connections.open(other, Kind.SAMPLED)
        if passes_host and rank < last:
            connections.open(after, Kind.HIDDEN, message_bytes)
        taken = connections.accept((rank < last) + (passes_host and before >= 0))
        opened = connections.settle()
        num_bytes = connections.num_bytes
    if passes_host:
        source, target = taken.get((before, Kind.HIDDEN)), opened.get((after, Kind.HIDDEN))
    else:  # the first stage begins, so that no pair waits in a circle
        if before >= 0:
            source = _device_link(meeting, range(before, rank + 1, tp_size), device)
        if rank < last:
            target = _device_link(meeting, range(rank, after + 1, tp_size), device)
    links = taken | opened
    sampled = [link for (_, kind), link in links.items() if kind is Kind.SAMPLED]
    index, count = rank // tp_size, meeting.size // tp_size
    names = [link.name for link in (source, target) if link is not None]
    how = f"stage {index} of {count} ({', '.join(dict.fromkeys(names))})"
    return Stage(index, count, None, source, target, tuple(sampled)), how, num_bytes


def _device_link(meeting: Meeting, ranks: range, device: torch.device) -> DeviceLink:
    pair = meeting.among(ranks, f"link {ranks.start}")
    return DeviceLink(NcclCollectives(pair, device))


def _card(device: torch.device) -> str:
    """Unique name of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_a_card(meeting: Meeting, card: str) -> bool:
    """Whether two or more ranks have the same GPU.

    Args:
        card: unique name of this rank's GPU.
    """
    cards = meeting.exchange("card", card.encode())
    return len(set(cards)) < len(cards)


def _connect_segment(meeting: Meeting) -> SharedMemoryCollectives | None:
    """Opens the segment that all ranks share; None: they do not see the same memory, or there is
    not enough of it.

    Equal host names or addresses are no proof of that (containers), so each rank looks for the
    memory that rank 0 has just made.
    """
    with contextlib.ExitStack() as stack:
        if meeting.rank == 0:
            made = _make_segment(meeting.size)
            if made is not None:
                stack.callback(os.close, made[1])
            meeting.publish("segment", json.dumps(made).encode())
        offer = json.loads(meeting.read("segment", 0))
        segment = None
        if offer is not None and has_shared_memory():
            segment = _attach(meeting, offer)
        with contextlib.ExitStack() as undo:
            if segment is not None:
                undo.callback(segment.close)
            if not all(meeting.exchange("attached", b"" if segment is None else b"1")):
                return None
            meeting.part()
            undo.pop_all()
        return segment


def _make_segment(num_ranks: int) -> tuple[int, int, str] | None:
    if not has_shared_memory():
        return None
    try:
        return shared_memory.make_segment(num_ranks, CAPACITY_BYTES)
    except SharedMemoryError as error:
        logger.warning("the ranks exchange by gloo, more slowly, until they start again: %s", error)
        return None


def _attach(meeting: Meeting, offer: tuple[int, int, str]) -> SharedMemoryCollectives | None:
    fd = shared_memory.find_segment(*offer)
    if fd is None:
        return None
    try:
        place = meeting.rank, meeting.size, CAPACITY_BYTES, meeting.collective_timeout_s
        return SharedMemoryCollectives(fd, *place, meeting.ranks.start)
    except OSError as error:
        logger.warning(
            "rank %d cannot map the shared memory of its group: %s; raise its limit of memory "
            "(ulimit -v, cgroup). Until they start again, the ranks exchange by gloo, more slowly",
            meeting.number,
            error,
        )
        return None


class _TorchCollectives:
    """Common part of gloo and NCCL: bounded waits, and errors that name the operation."""

    can_be_recorded = False

    def __init__(self, group: Any, meeting: Meeting) -> None:
        self.group = group  # a dist.Backend, whose calls torch's stubs do not declare
        self._rank, self._size, self._ranks = meeting.rank, meeting.size, meeting.ranks
        self._timeout_s = meeting.collective_timeout_s
        self._timeout = datetime.timedelta(seconds=self._timeout_s)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        return torch.cat(list(self._gather_parts("all_gather", x).unbind()), dim=-1).to(x.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenation over ranks at rank 0; elsewhere None (the other ranks drop the result)."""
        parts = self._gather_parts("gather", x)
        return torch.cat(list(parts.unbind()), dim=-1).to(x.device) if self._rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, in place if `x` is contiguous and the group sends it from where it is."""
        sent = self._placed(x)
        options = self._options(dist.BroadcastOptions())
        options.rootRank = 0
        self._run("broadcast", x, lambda: self.group.broadcast([_bytes(sent)], options))
        return sent.to(x.device)

    def abandon(self) -> None:
        """Breaks the connections; to the other ranks this looks like the death of this rank."""
        with contextlib.suppress(RuntimeError):
            self.group.abort()

    def close(self) -> None:
        """Closes the connections."""
        with contextlib.suppress(RuntimeError):
            self.group.shutdown()

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, contiguous, where the group can send it from."""
        return x.contiguous()

    def _gather_parts(self, operation: str, x: torch.Tensor) -> torch.Tensor:
        """Collects every rank's x, `[size, *x.shape]`, where the group has placed it."""
        x = self._placed(x)
        parts = x.new_empty(self._size, *x.shape)
        buffers, options = (_bytes(parts), _bytes(x)), self._options(AllgatherOptions())
        self._run(operation, x, lambda: self.group._allgather_base(*buffers, options))
        return parts

    def _options(self, options: _Options) -> _Options:
        """Sets where a call runs: NCCL's on the current stream, not on a stream of the group."""
        options.asyncOp = not self.can_be_recorded
        return options

    def _run(self, operation: str, x: torch.Tensor, start: Callable[[], dist.Work | None]) -> None:
        if x.numel() == 0:
            return
        try:
            self._wait(start())
        except RuntimeError as error:
            if is_device_fault(error):
                raise
            # gloo and NCCL do not say which peer failed; with two ranks there is only one.
            failed = self._ranks[1 - self._rank] if self._size == 2 else None
            name = "a peer" if failed is None else f"rank {failed}"
            here = self._ranks[self._rank]
            raise CollectiveError(
                f"{operation} of {x.nbytes} bytes at rank {here}: {name} has died or did not "
                f"arrive within {self._timeout_s:g} s ({error})",
                failed,
            ) from error

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "gloo gives each call a handle"
        work.wait(self._timeout)


class GlooCollectives(_TorchCollectives):
    """`Collectives` for CPU ranks of several hosts, and for ranks that share a GPU, whose tensors
    it copies to the host and back.

    Sums are computed as over shared memory (in rank order and float32), so that a model's tokens do
    not depend on the placement of its ranks. gloo listens on the node's address, not on the address
    to which the host name resolves. A call that waits for a frozen peer ends only at the timeout.
    """

    def __init__(self, meeting: Meeting) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=meeting.left_s)
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=meeting.address)
            options._devices = [device]
            store = dist.PrefixStore("gloo", meeting.store)
            group = dist.ProcessGroupGloo(store, meeting.rank, meeting.size, options)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {meeting.number} ({meeting.address}, interface "
                f"{interface_of(meeting.address) or 'unknown'}) could not connect with all other "
                f"ranks by gloo: {error}; every node must reach every other's address"
            ) from error
        super().__init__(group, meeting)
        group._set_default_timeout(self._timeout)

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu().contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        if self._size == 2 or x.nbytes < _DIVIDED_SUM_BYTES:
            return _sum(self._gather_parts("all_reduce", x)).to(x)
        share = -(-x.numel() // self._size)
        flat = torch.zeros(self._size, share, dtype=x.dtype)
        flat.view(-1)[: x.numel()] = x.flatten()
        parts = torch.empty_like(flat)
        received, sent, exchange = _bytes(parts), _bytes(flat), self.group.alltoall_base
        options = dist.AllToAllOptions()
        self._run("all_reduce", x, lambda: exchange(received, sent, [], [], options))
        sums = self._gather_parts("all_reduce", _sum(parts).to(x.dtype))
        return sums.view(-1)[: x.numel()].view(x.shape).to(x.device)


class NcclCollectives(_TorchCollectives):
    """`Collectives` for ranks on GPUs. Written from NCCL's documentation and not tested with two
    GPUs, because there was no such machine. A CUDA error, or NCCL's own watchdog, ends the process.

    Calls only queue work on the device's current stream: the host does not wait, and a CUDA graph
    can contain them. torch's default is a separate stream of the group, which costs two events and
    two waits per call. Code that needs the results waits with a bound (`ParallelState.wait_for`).
    Graphs that contain calls must be deleted before `abandon` and `close`.
    """

    can_be_recorded = True

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        interface = interface_of(meeting.address)
        if interface is not None:
            envs.set_nccl_interface(interface)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=meeting.collective_timeout_s)
        try:
            store = dist.PrefixStore("nccl", meeting.store)
            group = dist.ProcessGroupNCCL(store, meeting.rank, meeting.size, options)
            super().__init__(group, meeting)
            self._meet_all(device)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {meeting.number} ({meeting.address}, interface "
                f"{interface or 'unknown'}) "
                f"could not connect with all other ranks by NCCL: {error}"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in NCCL's order, in place if `x` is contiguous."""
        x = x.contiguous()
        options = self._options(dist.AllreduceOptions())
        self._run("all_reduce", x, lambda: self.group.allreduce([x], options))
        return x

    def _meet_all(self, device: torch.device) -> None:
        """Runs the first exchange, in which NCCL connects the ranks."""
        try:
            self.all_reduce(torch.zeros(1, device=device))
            state = ParallelState(self._rank, self._size, self, timeout_s=self._timeout_s)
            state.wait_for_queued(device)
        except BaseException:
            self.abandon()  # otherwise its kernel blocks all later work on the stream
            raise

    def _wait(self, work: dist.Work | None) -> None:
        """Does not wait: the stream keeps the order, and torch returns no handle."""


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as a flat uint8 tensor, because gloo has no bfloat16."""
    # as_strided, because a tensor of one element may have any stride and still be contiguous.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _sum(parts: torch.Tensor) -> torch.Tensor:
    """Sums parts `[num_ranks, ...]` in rank order in float32."""
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total
