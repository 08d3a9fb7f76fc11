"""Host memory in pages of 2 MiB, for what every step reads from end to end.

With ordinary pages of 4 KiB a stream through gigabytes of weights misses the TLB all the time, and
on a virtual machine each miss walks two tables. Linux gives large pages to those who ask
(`madvise`), and only where a whole aligned one fits: so many tensors share one mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_PIECE_BYTES = 64 << 20
_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None)  # mmap's own madvise would hold the interpreter's lock meanwhile
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in a mapping of its own; untouched pages take no memory.

    Raises:
        MemoryError: the machine will not promise as much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _mapping(num_bytes)[:num_bytes].view(dtype).view(shape)


def populate(tensors: Sequence[torch.Tensor], num_bytes: int, seconds: float) -> int:
    """Has memory put behind the beginnings of tensors of `empty`, as far as all get in this time
    and with so many bytes in all.

    The kernel clears a page when it is first written, in the middle of a step; on a virtual machine
    it may have to ask the host for it, too. Contents stay as they are.

    Returns:
        How many bytes of each tensor are there now; 0 where the kernel cannot be asked
        (`MADV_POPULATE_WRITE`, Linux 5.14).
    """
    end = time.perf_counter() + seconds
    longest = max((x.nbytes for x in tensors), default=0)
    longest = min(longest, num_bytes // max(1, len(tensors)))
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, longest, _PAGE_BYTES):
            ranges = [
                (x.data_ptr() + first, min(_PAGE_BYTES, x.nbytes - first, longest - first))
                for x in tensors
                if x.nbytes > first
            ]
            if time.perf_counter() > end or not all(pool.map(_populate_range, ranges)):
                return first
    return longest


def _populate_range(place: tuple[int, int]) -> bool:
    address, num_bytes = place
    return bool(_libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)


class HugePageArena:
    """Carves tensors out of large mappings, which live as long as any of their tensors."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised vector of `count` elements.

        Raises:
            MemoryError: the machine will not promise as much.
        """
        num_bytes = count * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if taken > len(self._piece):
            self._piece = _mapping(max(taken, _PIECE_BYTES))
        vector, self._piece = self._piece[:num_bytes], self._piece[taken:]
        return vector.view(dtype)


def _mapping(num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:  # a mapping cannot be empty
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
