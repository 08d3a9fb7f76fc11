"""Collectives over a segment of shared memory: the Python face of `csrc/cpu/shared_memory.cpp`.

They are called through ctypes, not as ops: this is about as fast, and a failure comes back as
data, from which the caller makes a typed error. ctypes releases Python's lock during a call.
"""

from __future__ import annotations

import ctypes
import os
import threading
from enum import IntEnum

import torch

from tpengine.ops.library import cpu_functions

PAGE_BYTES = 4096
TOKEN_BYTES = 64
"""The first bytes of a segment are a token of its creator, which identifies the file."""
MAX_RANKS = 64
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class SegmentStatus(IntEnum):
    """The result of an operation."""

    OK = 0
    TIMEOUT = 1
    """The peer did not start the operation in time."""
    DEAD = 2
    """The peer's process has died."""
    ABANDONED = 3
    """Another rank has abandoned the group."""
    MISMATCH = 4
    """The peer is in a different operation."""
    CLOSED = 5
    """This rank has closed the segment."""


class _Failure(ctypes.Structure):
    _fields_ = (
        ("status", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
        ("theirs", ctypes.c_uint64),
    )


class SegmentError(Exception):
    """An operation on a segment failed; the segment cannot be used any more.

    Attributes:
        rank: the peer; if the group was abandoned, the rank that abandoned it.
        culprit: the rank because of which that rank abandoned the group; None: it failed itself.
    """

    def __init__(self, status: SegmentStatus, rank: int, culprit: int | None) -> None:
        super().__init__(status, rank, culprit)
        self.status = status
        self.rank = rank
        self.culprit = culprit


_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_functions = cpu_functions(
    "tpengine_shm_",
    {
        "size": (_I64, [_I32, _I64]),
        "attach": (_POINTER, [_I32, _I32, _I32, _I64]),
        "detach": (None, [_POINTER]),
        "all_reduce": (_I32, [_POINTER, _POINTER, _I64, _I32, _I64]),
        "gather": (_I32, [_POINTER, _POINTER, _POINTER, _I64, _I64, _I32, _I64]),
        "broadcast": (_I32, [_POINTER, _POINTER, _I64, _I32, _I64]),
        "abandon": (None, [_POINTER, _I32]),
        "failure": (ctypes.POINTER(_Failure), [_POINTER]),
    },
)


def has_shared_memory() -> bool:
    """Whether the compiled library, which holds these collectives, is loaded."""
    return _functions is not None


def segment_bytes(num_ranks: int, capacity_bytes: int) -> int:
    """Size in bytes of a segment that holds `capacity_bytes` of each rank at a time."""
    assert _functions is not None
    return int(_functions.tpengine_shm_size(num_ranks, capacity_bytes))


class Segment:
    """A segment as one rank has mapped it.

    All ranks call the same methods in the same order, each from one thread; any thread may call
    `abandon` and `close`.

    Args:
        fd: the fully allocated file; the segment closes it.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int, capacity_bytes: int) -> None:
        assert _functions is not None
        self._functions = _functions
        self._handle = _functions.tpengine_shm_attach(fd, rank, num_ranks, capacity_bytes)
        if not self._handle:
            number = ctypes.get_errno()
            os.close(fd)
            raise OSError(number, os.strerror(number))
        self._rank, self._num_ranks = rank, num_ranks
        # The locks keep the segment mapped while another thread reads it. There are two, because
        # `abandon` must not wait for the operation that it ends.
        self._in_use, self._unmapping = threading.Lock(), threading.Lock()

    def all_reduce(self, x: torch.Tensor, timeout_ns: int) -> None:
        """Sums x over ranks, in place, in rank order and in float32.

        Args:
            x: contiguous, float32 or bfloat16, any shape.

        Raises:
            SegmentError: a peer has failed, or has not arrived in time.
        """
        dtype = _DTYPES[x.dtype]
        with self._in_use:
            status = self._functions.tpengine_shm_all_reduce(
                self._handle, x.data_ptr(), x.numel(), dtype, timeout_ns
            )
            self._check(status)

    def gather(self, x: torch.Tensor, root: int | None, timeout_ns: int) -> torch.Tensor | None:
        """Concatenates x of all ranks along the last dimension.

        Args:
            x: contiguous, of the same shape and dtype on every rank.
            root: the rank that gets the result, the others get None; None: every rank.

        Raises:
            SegmentError: as in `all_reduce`.
        """
        out = None
        if root is None or root == self._rank:
            out = x.new_empty(*x.shape[:-1], x.shape[-1] * self._num_ranks)
        row_bytes = x.shape[-1] * x.element_size()
        rows = x.nbytes // row_bytes if row_bytes else 0
        target = None if out is None else out.data_ptr()
        at = -1 if root is None else root
        with self._in_use:
            status = self._functions.tpengine_shm_gather(
                self._handle, target, x.data_ptr(), rows, row_bytes, at, timeout_ns
            )
            self._check(status)
        return out

    def broadcast(self, x: torch.Tensor, root: int, timeout_ns: int) -> None:
        """Overwrites every rank's x, contiguous, with x of rank `root`.

        Raises:
            SegmentError: as in `all_reduce`.
        """
        with self._in_use:
            status = self._functions.tpengine_shm_broadcast(
                self._handle, x.data_ptr(), x.nbytes, root, timeout_ns
            )
            self._check(status)

    def abandon(self, culprit: int | None = None) -> None:
        """Ends the waits of all ranks, now and later, with an error that names `culprit`."""
        with self._unmapping:
            self._functions.tpengine_shm_abandon(self._handle, -1 if culprit is None else culprit)

    def close(self) -> None:
        """Ends the waits of all ranks and unmaps the segment; a second call does nothing."""
        self.abandon()
        with self._in_use, self._unmapping:
            handle, self._handle = self._handle, None
            self._functions.tpengine_shm_detach(handle)

    def _check(self, status: int) -> None:
        if status == SegmentStatus.OK:
            return
        if status == SegmentStatus.CLOSED:
            raise SegmentError(SegmentStatus.CLOSED, self._rank, None)
        failure = self._functions.tpengine_shm_failure(self._handle).contents
        culprit = failure.culprit if failure.culprit >= 0 else None
        raise SegmentError(SegmentStatus(failure.status), failure.rank, culprit)
