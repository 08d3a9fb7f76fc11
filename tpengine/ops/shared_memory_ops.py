"""Functions on a segment of shared memory: the Python face of `csrc/cpu/shared_memory.cpp`.

They are called through ctypes, not as ops: this is about as fast, and a failure comes back as
data, from which the caller makes a typed error. ctypes releases Python's lock during a call. While
the thread notes a `Recording`, an operation becomes one of its calls.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch

from tpengine.ops.library import cpu_functions

PAGE_BYTES = 4096
TOKEN_BYTES = 64
"""The first bytes of a segment are a token of its creator, which identifies the file."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class SegmentStatus(IntEnum):
    """Why an operation failed."""

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
    """Why an operation failed.

    `rank` is the peer; if the group was abandoned, the rank that abandoned it. `culprit` is the
    rank because of which that rank abandoned the group; below 0: it failed itself.
    """

    _fields_ = (
        ("status", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
    )


_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SUCCESS = ctypes.c_bool
functions = cpu_functions(
    "tpengine_shm_",
    {
        "size": (_I64, [_I32, _I64]),
        "attach": (_POINTER, [_I32, _I32, _I32, _I64]),
        "close": (None, [_POINTER]),
        "delete": (None, [_POINTER]),
        "all_reduce": (_SUCCESS, [_POINTER, _POINTER, _I64, _I32, _I64]),
        "gather": (_SUCCESS, [_POINTER, _POINTER, _POINTER, _I64, _I64, _I32, _I64]),
        "broadcast": (_SUCCESS, [_POINTER, _POINTER, _I64, _I32, _I64]),
        "abandon": (None, [_POINTER, _I32]),
        "failure": (ctypes.POINTER(_Failure), [_POINTER]),
    },
)


def has_shared_memory() -> bool:
    """Whether the compiled library, which holds these collectives, is loaded."""
    return functions is not None


def segment_bytes(num_ranks: int, capacity_bytes: int) -> int:
    """Size in bytes of a segment that holds `capacity_bytes` of each rank at a time."""
    assert functions is not None
    return int(functions.tpengine_shm_size(num_ranks, capacity_bytes))
