"""torch's process groups as collectives: gloo on CPU, NCCL on GPUs, and gloo through the host.

The groups are made as objects and never registered with torch: engines in one process do not touch
each other.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from tpengine import envs
from tpengine.distributed.parallel_state import Collectives, ParallelState
from tpengine.distributed.rendezvous import Meeting, interface_of
from tpengine.errors import CollectiveError, RendezvousError, is_device_fault

_DIVIDED_SUM_BYTES = 65536
"""From here on ranks sum a part each and exchange the sums: less traffic, one more round trip."""
_Options = TypeVar("_Options", dist.AllreduceOptions, AllgatherOptions, dist.BroadcastOptions)


class _TorchCollectives:
    """What gloo and NCCL have in common: bounded waits, and errors that name the operation."""

    can_be_recorded = False

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
        options = self._options(dist.BroadcastOptions())
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
        options = self._options(AllgatherOptions())
        self._run(
            operation, x, lambda: self._group._allgather_base(_bytes(parts), _bytes(x), options)
        )
        return parts

    def _options(self, options: _Options) -> _Options:
        """`options` as this kind of group wants them; each call has its own."""
        return options

    def _run(self, operation: str, x: torch.Tensor, start: Callable[[], dist.Work | None]) -> None:
        if x.numel() == 0:
            return
        try:
            self._wait(start())
        except RuntimeError as error:
            if is_device_fault(error):
                raise
            # With two ranks it is clear who is meant.
            failed = 1 - self._rank if self._size == 2 else None
            name = "a peer" if failed is None else f"rank {failed}"
            raise CollectiveError(
                f"{operation} of {x.nbytes} bytes at rank {self._rank}: {name} is gone or did not "
                f"arrive within {self._timeout_s:g} s ({error})",
                failed,
            ) from error

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "gloo gives each call a handle"
        work.wait(self._timeout)


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
    no machine with two GPUs. A CUDA error, and NCCL's own watchdog, end the process.

    Calls only queue work on the device's current stream: the host does not wait, and a graph can
    hold them. torch's default is a stream of the group's own, which costs two events and two waits
    a call. The caller of what needs the results waits with a bound (`ParallelState.wait_for`).
    Graphs that hold calls must be gone before `abandon` and `close`.
    """

    can_be_recorded = True

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
            self._meet_all(device)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {meeting.rank} ({meeting.address}, interface {interface or 'unknown'}) "
                f"could not connect with all other ranks by NCCL: {error}"
            ) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in NCCL's order, in place where `x` is contiguous."""
        x = x.contiguous()
        options = self._options(dist.AllreduceOptions())
        self._run("all_reduce", x, lambda: self._group.allreduce([x], options))
        return x

    def _meet_all(self, device: torch.device) -> None:
        """The first exchange, in which NCCL connects the ranks."""
        try:
            self.all_reduce(torch.zeros(1, device=device))
            state = ParallelState(self._rank, self._size, self, timeout_s=self._timeout_s)
            state.wait_for_queued(device)
        except BaseException:
            self.abandon()  # its kernel would hold the stream, and all that is queued behind it
            raise

    def _options(self, options: _Options) -> _Options:
        options.asyncOp = False
        return options

    def _wait(self, work: dist.Work | None) -> None:
        """The stream keeps the order, so there is nothing to wait for; torch gives no handle."""


class HostCollectives:
    """See `Collectives`; ranks that share a GPU: what they exchange goes through the host.

    Args:
        inner: exchanges tensors on the CPU.
    """

    can_be_recorded = False

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks."""
        return self._inner.all_reduce(x.cpu()).to(x.device)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        return self._inner.all_gather(x.cpu()).to(x.device)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same at rank 0; elsewhere None."""
        gathered = self._inner.gather(x.cpu())
        return None if gathered is None else gathered.to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`."""
        return self._inner.broadcast(x.cpu()).to(x.device)

    def abandon(self) -> None:
        """Tells the others that this rank takes part no more."""
        self._inner.abandon()

    def close(self) -> None:
        """Closes the connections."""
        self._inner.close()


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
