"""Collectives of CPU ranks on one host, over shared memory.

Rank 0 creates a file, all ranks map it, then its name is removed: whatever happens later, nothing
is left behind. Until then the name tells who made it, so that the left-overs of a process that died
in between are found.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import torch

from tpengine.errors import CollectiveError, SharedMemoryError
from tpengine.host import SHM_FOLDER, lock_bytes, segment_name, sweep_segments
from tpengine.ops.shared_memory import (
    MAX_RANKS,
    PAGE_BYTES,
    TOKEN_BYTES,
    Segment,
    SegmentError,
    SegmentFailure,
    SegmentStatus,
    segment_bytes,
)

CAPACITY_BYTES = 1 << 20
"""What passes through at once of each rank; more goes in chunks. Two ranks need 6 MiB, eight 18:
a container's usual 64 MB hold several engines."""
_MIB = 1 << 20


class SegmentFile:
    """The file of a segment, as rank 0 makes it.

    Attributes:
        path: where the others find it.
        token: its first bytes; whoever reads them there sees the same file.

    Raises:
        OSError: no file can be made in the folder.
    """

    def __init__(self, engine_id: str, epoch: int, folder: Path = SHM_FOLDER) -> None:
        sweep_segments(folder)
        self.path = folder / segment_name(engine_id, epoch)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            lock_bytes(self.fd, MAX_RANKS, 1)
            os.write(self.fd, self.token)
        except OSError:
            self.remove()
            os.close(self.fd)
            raise

    def allocate(self, num_ranks: int, capacity_bytes: int) -> None:
        """Gets all of the memory now: later a lack of it would be a SIGBUS.

        Raises:
            SharedMemoryError: there is not enough.
        """
        size = segment_bytes(num_ranks, capacity_bytes)
        if size == 0 or capacity_bytes % PAGE_BYTES:
            raise SharedMemoryError(
                f"no segment for {num_ranks} ranks with {capacity_bytes} bytes for each: at most "
                f"64 ranks, and multiples of {PAGE_BYTES} bytes"
            )
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            folder = self.path.parent
            stat = os.statvfs(folder)
            free, total = (
                blocks * stat.f_frsize / _MIB for blocks in (stat.f_bavail, stat.f_blocks)
            )
            raise SharedMemoryError(
                f"{num_ranks} ranks need {size / _MIB:.1f} MiB of shared memory, and {folder} has "
                f"{free:.1f} MiB free of {total:.1f} ({error.strerror}); enlarge it (docker run "
                f"--shm-size=256m; in Kubernetes an emptyDir of medium Memory at {folder}), or "
                "remove what other programs left there"
            ) from error

    def remove(self) -> None:
        """Removes the name; the memory lives as long as somebody maps it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def find_segment_file(path: Path, token: bytes) -> int | None:
    """A descriptor of the segment's file; None: this process does not see that file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(fd, TOKEN_BYTES, 0) == token:
        return fd
    os.close(fd)
    return None


class SharedMemoryCollectives:
    """See `Collectives`; tensors are float32 or bfloat16 on CPU (others can be gathered and
    broadcast, not summed)."""

    can_be_recorded = False

    def __init__(self, segment: Segment, rank: int, timeout_s: float) -> None:
        self._segment = segment
        self._rank = rank
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * 1e9)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where `x` is contiguous."""
        x = x.contiguous()
        try:
            self._segment.all_reduce(x, self._timeout_ns)
        except SegmentError as error:
            raise self._lost("all_reduce", x, error.failure) from error
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        x = x.contiguous()
        try:
            gathered = self._segment.gather(x, None, self._timeout_ns)
        except SegmentError as error:
            raise self._lost("all_gather", x, error.failure) from error
        assert gathered is not None
        return gathered

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same at rank 0; elsewhere None."""
        x = x.contiguous()
        try:
            return self._segment.gather(x, 0, self._timeout_ns)
        except SegmentError as error:
            raise self._lost("gather", x, error.failure) from error

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, in place where `x` is contiguous."""
        x = x.contiguous()
        try:
            self._segment.broadcast(x, 0, self._timeout_ns)
        except SegmentError as error:
            raise self._lost("broadcast", x, error.failure) from error
        return x

    def abandon(self) -> None:
        """Wakes all who wait; they fail at once."""
        self._segment.abandon()

    def close(self) -> None:
        """Unmaps the segment; the last rank to do so frees it."""
        self._segment.close()

    def _lost(self, operation: str, x: torch.Tensor, failure: SegmentFailure) -> CollectiveError:
        what = f"{operation} of {x.nbytes} bytes at rank {self._rank}"
        rank = failure.rank
        if failure.status is SegmentStatus.CLOSED:
            return CollectiveError(f"{what}: this rank has left the group", rank)
        if failure.status is SegmentStatus.ABANDONED:
            if failure.culprit is None:
                return CollectiveError(f"{what}: rank {rank} failed, or left the group", rank)
            blame = failure.culprit
            return CollectiveError(f"{what}: rank {rank} gave the group up for rank {blame}", blame)
        self._segment.abandon(rank)  # the others need not find out for themselves
        if failure.status is SegmentStatus.DEAD:
            return CollectiveError(f"{what}: the process of rank {rank} is gone", rank)
        if failure.status is SegmentStatus.TIMEOUT:
            return CollectiveError(
                f"{what}: rank {rank} did not arrive within {self._timeout_s:g} s; it is frozen, "
                "or busy for longer",
                rank,
            )
        return CollectiveError(
            f"{what}: rank {rank} takes part in another operation; ranks must do the same in the "
            "same order"
        )
