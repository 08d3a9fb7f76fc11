"""Collectives of CPU ranks on one host, over shared memory.

Rank 0 creates a file, all ranks map it, then its name is removed, so that the kernel frees the
memory when the last rank ends. Until then the name contains the creator's process, so that a later
start finds and removes the file of a creator that died in between.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import torch

from tpengine.errors import CollectiveError, SharedMemoryError
from tpengine.host import SHM_FOLDER, lock_bytes, segment_name, sweep_segments
from tpengine.ops.shared_memory_ops import (
    MAX_RANKS,
    PAGE_BYTES,
    TOKEN_BYTES,
    Segment,
    SegmentError,
    SegmentStatus,
    segment_bytes,
)

CAPACITY_BYTES = 1 << 20
"""Bytes of each rank that the segment holds at a time; a larger tensor is sent in chunks. Two ranks
need 6 MiB, eight need 18 MiB: the usual 64 MB of a container are enough for several engines."""
_MIB = 1 << 20


class SegmentFile:
    """The file of a segment, created by rank 0.

    Attributes:
        path: where the other ranks open it.
        token: its first bytes; a rank that reads them at this path has the same file.

    Raises:
        OSError: no file can be created in the folder.
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
        """Allocates all memory now, because a lack of it later would raise SIGBUS.

        Raises:
            SharedMemoryError: there is not enough memory, or the sizes are not allowed.
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
            raise SharedMemoryError(
                describe_lack(num_ranks, size, self.path.parent, error)
            ) from error

    def remove(self) -> None:
        """Removes the name; the memory stays until the last process unmaps it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def describe_lack(num_ranks: int, size: int, folder: Path, error: OSError) -> str:
    """Why there is no segment of `size` bytes, and what to change."""
    stat = os.statvfs(folder)
    free, total = (blocks * stat.f_frsize / _MIB for blocks in (stat.f_bavail, stat.f_blocks))
    return (
        f"{num_ranks} ranks need {size / _MIB:.1f} MiB of shared memory, and {folder} has "
        f"{free:.1f} MiB free of {total:.1f} ({error.strerror}); enlarge it (docker run "
        f"--shm-size=256m; in Kubernetes an emptyDir of medium Memory at {folder}), or "
        "remove what other programs left there"
    )


def find_segment_file(path: Path, token: bytes) -> int | None:
    """Opens the segment's file and returns its descriptor; None: this process does not see it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(fd, TOKEN_BYTES, 0) == token:
        return fd
    os.close(fd)
    return None


class SharedMemoryCollectives:
    """`Collectives` over a segment, for CPU tensors.

    Sums take float32 and bfloat16; the other operations take every dtype.
    """

    can_be_recorded = False

    def __init__(self, segment: Segment, rank: int, timeout_s: float) -> None:
        self._segment = segment
        self._rank = rank
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * 1e9)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place if `x` is contiguous."""
        x = x.contiguous()
        try:
            self._segment.all_reduce(x, self._timeout_ns)
        except SegmentError as error:
            raise self._explain("all_reduce", x, error) from error
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation over ranks along the last dimension."""
        gathered = self._gather("all_gather", x, None)
        assert gathered is not None
        return gathered

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenation over ranks along the last dimension at rank 0; elsewhere None."""
        return self._gather("gather", x, 0)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, in place if `x` is contiguous."""
        x = x.contiguous()
        try:
            self._segment.broadcast(x, 0, self._timeout_ns)
        except SegmentError as error:
            raise self._explain("broadcast", x, error) from error
        return x

    def abandon(self) -> None:
        """Ends the waits of all ranks; each fails at once."""
        self._segment.abandon()

    def close(self) -> None:
        """Unmaps the segment; its memory is freed when the last rank does so."""
        self._segment.close()

    def _gather(self, operation: str, x: torch.Tensor, root: int | None) -> torch.Tensor | None:
        x = x.contiguous()
        try:
            return self._segment.gather(x, root, self._timeout_ns)
        except SegmentError as error:
            raise self._explain(operation, x, error) from error

    def _explain(self, operation: str, x: torch.Tensor, error: SegmentError) -> CollectiveError:
        """Makes the error that names the failed rank, and tells the other ranks."""
        what = f"{operation} of {x.nbytes} bytes at rank {self._rank}"
        rank, culprit = error.rank, error.culprit
        if error.status is SegmentStatus.CLOSED:
            return CollectiveError(f"{what}: this rank has left the group", rank)
        if error.status is SegmentStatus.ABANDONED:
            if culprit is None:
                return CollectiveError(f"{what}: rank {rank} failed, or left the group", rank)
            return CollectiveError(
                f"{what}: rank {rank} left the group because of rank {culprit}", culprit
            )
        self._segment.abandon(rank)  # so that the other ranks do not wait for their own timeout
        if error.status is SegmentStatus.DEAD:
            return CollectiveError(f"{what}: the process of rank {rank} has died", rank)
        if error.status is SegmentStatus.TIMEOUT:
            return CollectiveError(
                f"{what}: rank {rank} did not arrive within {self._timeout_s:g} s; it is frozen, "
                "or busy for longer",
                rank,
            )
        return CollectiveError(
            f"{what}: rank {rank} takes part in another operation; ranks must do the same in the "
            "same order"
        )
