"""Collectives of CPU ranks on one host, over shared memory.

Rank 0 makes the memory as a file without a name (a memfd), and the others open it by rank 0's
process. The kernel frees it when the last rank ends, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import weakref
from collections.abc import Callable

from torch import Tensor

from tpengine.errors import CollectiveError, SharedMemoryError
from tpengine.ops import shared_memory_ops as native
from tpengine.ops.recording import Recording
from tpengine.ops.shared_memory_ops import SegmentStatus

CAPACITY_BYTES = 1 << 20
"""Bytes of each rank that the segment holds at a time; a larger tensor is sent in chunks. Two ranks
need 6 MiB, eight need 18 MiB."""
_MIB = 1 << 20


def make_segment(num_ranks: int, capacity: int) -> tuple[int, int, str]:
    """Makes the memory of a segment; returns what `find_segment` needs: this process, its
    descriptor of the memory, and a token, with which the memory begins.

    Raises:
        SharedMemoryError: there is not enough memory, or the sizes are not allowed.
    """
    size = native.segment_bytes(num_ranks, capacity)
    if size == 0 or capacity % native.PAGE_BYTES:
        raise SharedMemoryError(
            f"no segment for {num_ranks} ranks with {capacity} bytes for each: at most "
            f"64 ranks, and multiples of {native.PAGE_BYTES} bytes"
        )
    return make_memory(size, f"{num_ranks} ranks")


def make_memory(size: int, who: str) -> tuple[int, int, str]:
    """Makes memory of that many bytes; returns what `make_segment` does.

    Args:
        who: needs it, for the error.

    Raises:
        SharedMemoryError: there is not enough.
    """
    token = secrets.token_bytes(native.TOKEN_BYTES)
    try:
        fd = os.memfd_create("tpengine", os.MFD_CLOEXEC)
        try:
            os.write(fd, token)
            os.posix_fallocate(fd, 0, size)  # a lack of it later would raise SIGBUS
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise SharedMemoryError(
            f"{who} need {size / _MIB:.1f} MiB of shared memory ({error.strerror}); "
            "free memory, or raise the limits of memory (cgroup) and open files (ulimit -n)"
        ) from error
    return os.getpid(), fd, token.hex()


def find_segment(pid: int, fd: int, token: str) -> int | None:
    """Opens a segment's memory; returns a descriptor, or None if this process does not see it, as
    in another container."""
    try:
        # It may be a pipe or a terminal of that process.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        own_fd = os.open(f"/proc/{pid:d}/fd/{fd:d}", flags)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another process may have this number, and no file here
        if os.pread(own_fd, native.TOKEN_BYTES, 0) == bytes.fromhex(token):
            return own_fd
    os.close(own_fd)
    return None


class SharedMemoryCollectives:
    """`Collectives` over a segment that this rank maps, for CPU tensors.

    Sums take float32 and bfloat16; the other operations take every dtype. All ranks call the same
    methods in the same order, each from one thread; any thread may call `abandon` and `close`.

    Args:
        fd: of the memory; closed here.
        capacity: bytes of each rank that the segment holds at a time.
        first: number of rank 0 among the ranks of all pipeline stages, for errors.

    Raises:
        OSError: the memory cannot be mapped.
    """

    can_be_recorded = True

    def __init__(
        self, fd: int, rank: int, size: int, capacity: int, timeout_s: float, first: int = 0
    ) -> None:
        assert native.functions is not None
        self._functions = native.functions
        self._handle = self._functions.tpengine_shm_attach(fd, rank, size, capacity)
        if not self._handle:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, os.strerror(number))
        end = weakref.finalize(self, self._functions.tpengine_shm_delete, self._handle)
        end.atexit = False  # at exit a daemon thread may still be in an operation
        self._rank, self._size, self._first = rank, size, first
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * 1e9)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in rank order and in float32, in place if `x` is contiguous."""
        x = x.contiguous()
        place = x.data_ptr(), x.numel(), native.DTYPES[x.dtype]
        self._run("all_reduce", x, None, self._functions.tpengine_shm_all_reduce, *place)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenation over ranks along the last dimension."""
        out = self._gathered(x)
        self._gather("all_gather", x, out, -1)
        return out

    def gather(self, x: Tensor) -> Tensor | None:
        """Concatenation over ranks along the last dimension at rank 0; elsewhere None."""
        out = self._gathered(x) if self._rank == 0 else None
        self._gather("gather", x, out, 0)
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, in place if `x` is contiguous."""
        x = x.contiguous()
        place = x.data_ptr(), x.nbytes, 0
        self._run("broadcast", x, None, self._functions.tpengine_shm_broadcast, *place)
        return x

    def abandon(self, culprit: int = -1) -> None:
        """Ends the waits of all ranks, now and later, with an error that names `culprit`."""
        self._functions.tpengine_shm_abandon(self._handle, culprit)

    def close(self) -> None:
        """Ends the waits of all ranks and unmaps the segment; a second call does nothing.

        Its memory is freed when the last rank does so.
        """
        self._functions.tpengine_shm_close(self._handle)

    def _gathered(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] * self._size)

    def _gather(self, operation: str, x: Tensor, out: Tensor | None, root: int) -> None:
        """Concatenates x of all ranks into `out` at rank `root`; -1: at every rank."""
        x = x.contiguous()
        row_bytes = x.shape[-1] * x.element_size()
        rows = x.nbytes // row_bytes if row_bytes else 0
        target = None if out is None else out.data_ptr()
        place = target, x.data_ptr(), rows, row_bytes, root
        self._run(operation, x, out, self._functions.tpengine_shm_gather, *place)

    def _run(
        self,
        operation: str,
        x: Tensor,
        out: Tensor | None,
        function: Callable[..., bool],
        *place: int | None,
    ) -> None:
        num_bytes, recording = x.nbytes, Recording.here()
        if recording is not None:
            most = recording.num_rows
            recording.expect(x, out, lambda n: self._failure(operation, num_bytes // most * n))
        if not function(self._handle, *place, self._timeout_ns):
            raise self._failure(operation, num_bytes)

    def _failure(self, operation: str, num_bytes: int) -> CollectiveError:
        """Makes the error that names the failed rank."""
        here = self._first + self._rank
        what = f"{operation} of {num_bytes} bytes at rank {here}"
        failure = self._functions.tpengine_shm_failure(self._handle).contents
        rank = self._first + failure.rank
        failed: int | None = rank
        match failure.status:
            case SegmentStatus.CLOSED:
                why, failed = "this rank has left the group", here
            case SegmentStatus.ABANDONED if failure.culprit < 0:
                why = f"rank {rank} failed, or left the group"
            case SegmentStatus.ABANDONED:
                failed = self._first + failure.culprit
                why = f"rank {rank} left the group because of rank {failed}"
            case SegmentStatus.DEAD:
                why = f"the process of rank {rank} has died"
            case SegmentStatus.TIMEOUT:
                why = f"rank {rank} did not arrive within {self._timeout_s:g} s; it is frozen, or "
                why += "busy for longer"
            case _:
                failed, why = None, f"rank {rank} takes part in another operation; ranks must do "
                why += "the same in the same order"
        return CollectiveError(f"{what}: {why}", failed)
