"""Collectives over a segment of shared memory: the Python face of `csrc/cpu/shared_memory.cpp`.

Called through ctypes rather than as ops: about as fast, and a failure comes back as data, from
which the caller makes a typed error. Python's lock is free while a rank waits.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from enum import IntEnum

import torch

from tpengine.ops.library import cpu_functions

PAGE_BYTES = 4096
TOKEN_BYTES = 64
"""A segment's first bytes are its creator's, to recognise the file by."""
MAX_RANKS = 64
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class SegmentStatus(IntEnum):
    """How an operation ended."""

    OK = 0
    TIMEOUT = 1
    """The peer did not arrive in time."""
    DEAD = 2
    """The peer's process is gone."""
    ABANDONED = 3
    """Another rank gave the group up."""
    MISMATCH = 4
    """The peer takes part in another operation than this rank."""
    CLOSED = 5
    """This rank has closed the segment itself."""


class _Failure(ctypes.Structure):
    _fields_ = (
        ("status", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
        ("theirs", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class SegmentFailure:
    """Why an operation failed.

    Attributes:
        rank: the peer; where the group was given up, the rank that did it.
        culprit: the rank that one blamed; None: it failed itself.
    """

    status: SegmentStatus
    rank: int
    culprit: int | None


class SegmentError(Exception):
    """An operation on a segment failed, and the segment is of no use any more."""

    def __init__(self, failure: SegmentFailure) -> None:
        super().__init__(failure)
        self.failure = failure


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
    """Whether the compiled library, and with it these collectives, is there."""
    return _functions is not None


def segment_bytes(num_ranks: int, capacity_bytes: int) -> int:
    """Size of a segment through which `capacity_bytes` of each rank pass at once."""
    assert _functions is not None
    return int(_functions.tpengine_shm_size(num_ranks, capacity_bytes))


class Segment:
    """A mapped segment, seen by one rank. All ranks call the same methods in the same order, one
    thread of each; any thread may call `abandon` and `close`.

    Args:
        fd: the file, fully allocated; belongs to the segment from now on.

    Raises:
        OSError: it cannot be mapped.
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
        # Nobody unmaps what another thread reads. Two locks, for `abandon` must not wait for the
        # operation that it is to end.
        self._in_use, self._unmapping = threading.Lock(), threading.Lock()

    def all_reduce(self, x: torch.Tensor, timeout_ns: int) -> None:
        """Sums over ranks, in rank order and in float32, in place.

        Args:
            x: contiguous, float32 or bfloat16.

        Raises:
            SegmentError: a peer did not take part.
        """
        dtype = _DTYPES[x.dtype]
        with self._in_use:
            failed = self._functions.tpengine_shm_all_reduce(
                self._handle, x.data_ptr(), x.numel(), dtype, timeout_ns
            )
            if failed:
                raise self._error(failed)

    def gather(self, x: torch.Tensor, root: int | None, timeout_ns: int) -> torch.Tensor | None:
        """All ranks' x along the last dimension, at `root` (None: everywhere); elsewhere None.

        Args:
            x: contiguous, of the same shape on every rank.
        """
        out = None
        if root is None or root == self._rank:
            out = x.new_empty(*x.shape[:-1], x.shape[-1] * self._num_ranks)
        row_bytes = x.shape[-1] * x.element_size()
        rows = x.nbytes // row_bytes if row_bytes else 0
        target = None if out is None else out.data_ptr()
        at = -1 if root is None else root
        with self._in_use:
            failed = self._functions.tpengine_shm_gather(
                self._handle, target, x.data_ptr(), rows, row_bytes, at, timeout_ns
            )
            if failed:
                raise self._error(failed)
        return out

    def broadcast(self, x: torch.Tensor, root: int, timeout_ns: int) -> None:
        """Overwrites every rank's x, contiguous, with that of `root`."""
        with self._in_use:
            failed = self._functions.tpengine_shm_broadcast(
                self._handle, x.data_ptr(), x.nbytes, root, timeout_ns
            )
            if failed:
                raise self._error(failed)

    def abandon(self, culprit: int | None = None) -> None:
        """Ends every rank's waits, now and for ever."""
        with self._unmapping:
            self._functions.tpengine_shm_abandon(self._handle, -1 if culprit is None else culprit)

    def close(self) -> None:
        """Ends every rank's waits and unmaps; a second call does nothing."""
        self.abandon()
        with self._in_use, self._unmapping:
            handle, self._handle = self._handle, None
            self._functions.tpengine_shm_detach(handle)

    def _error(self, status: int) -> SegmentError:
        if status == SegmentStatus.CLOSED:
            return SegmentError(SegmentFailure(SegmentStatus.CLOSED, self._rank, None))
        found = self._functions.tpengine_shm_failure(self._handle).contents
        culprit = found.culprit if found.culprit >= 0 else None
        return SegmentError(SegmentFailure(SegmentStatus(found.status), found.rank, culprit))
