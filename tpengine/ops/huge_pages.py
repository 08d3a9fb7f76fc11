"""Host memory in pages of 2 MiB, for weights and caches that every step reads from end to end.

With pages of 4 KiB a stream through gigabytes of weights misses the TLB on almost every page, and
on a virtual machine each miss reads two page tables. Linux gives large pages on request (`madvise`)
and only where a whole aligned page fits, so many tensors share one mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_PIECE_BYTES = 64 << 20
PAGE_BYTES = 2 << 20
_ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector register."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_MAP_FIXED = 0x10
_CANNOT_MAP = "{} bytes of host memory cannot be mapped: {}"

# mmap's own madvise would hold Python's lock during the call.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocates an uninitialised tensor in its own mapping; untouched pages take no memory.

    Raises:
        MemoryError: the kernel refuses a mapping of this size.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _mapping(num_bytes)[:num_bytes].view(dtype).view(shape)


def populate(tensors: Sequence[torch.Tensor], num_bytes: int, seconds: float) -> int:
    """Allocates the pages at the beginning of each tensor, within a limit of bytes and time.

    Otherwise the kernel allocates and clears a page at its first write, in the middle of a step; on
    a virtual machine it may also have to request it from the host. Contents do not change.

    Args:
        tensors: made by `empty` or `map_file`.
        num_bytes: limit for all tensors together.
        seconds: limit of time; allocation stops after the page that crosses it.

    Returns:
        Number of bytes of each tensor that are allocated; 0 if the kernel has no
        `MADV_POPULATE_WRITE` (Linux before 5.14).
    """
    end = time.perf_counter() + seconds
    longest = max((x.nbytes for x in tensors), default=0)
    longest = min(longest, num_bytes // max(1, len(tensors)))
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, longest, PAGE_BYTES):
            ranges = [
                (x.data_ptr() + first, min(PAGE_BYTES, x.nbytes - first, longest - first))
                for x in tensors
                if x.nbytes > first
            ]
            if time.perf_counter() > end or not all(pool.map(_populate_range, ranges)):
                return first
    return longest


def _populate_range(place: tuple[int, int]) -> bool:
    address, num_bytes = place
    if num_bytes == PAGE_BYTES:
        # A file gets a large page only on this request (Linux 6.1), in place of small ones.
        _libc.madvise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        _libc.madvise(address, num_bytes, _MADV_COLLAPSE)
    return bool(_libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)


class HugePageArena:
    """Allocates tensors in large mappings; a mapping is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialised tensor `[count]`.

        Raises:
            MemoryError: the kernel refuses a mapping of this size.
        """
        num_bytes = count * dtype.itemsize
        taken = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if taken > len(self._piece):
            self._piece = _mapping(max(taken, _PIECE_BYTES))
        vector, self._piece = self._piece[:num_bytes], self._piece[taken:]
        return vector.view(dtype)


def map_file(fd: int, start: int, num_bytes: int) -> torch.Tensor:
    """Maps a part of a file, uint8 `[num_bytes]`, shared with every process that does so. With a
    `start` that is a multiple of `PAGE_BYTES`, `populate` gives it large pages.

    What has been written into it is mapped at once (0.1 s for a GiB). Otherwise the next step maps
    it page by page, which takes far longer: the kernels prefetch, and each prefetch of a page that
    is not mapped walks through the page tables and then does nothing.

    Raises:
        MemoryError: the kernel refuses a mapping of this size, or the file is shorter.
    """
    if num_bytes == 0:  # a mapping cannot be empty
        return torch.empty(0, dtype=torch.uint8)
    if start + num_bytes > (size := os.fstat(fd).st_size):
        raise MemoryError(_CANNOT_MAP.format(num_bytes, f"the file ends after {size - start}"))
    room = _anonymous(num_bytes + PAGE_BYTES)
    offset = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % PAGE_BYTES
    memory = torch.frombuffer(room, dtype=torch.uint8, count=num_bytes, offset=offset)
    address, protection = memory.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED  # in place of that room, and unmapped with it
    if _libc.mmap(address, num_bytes, protection, flags, fd, start) != address:
        raise MemoryError(_CANNOT_MAP.format(num_bytes, os.strerror(ctypes.get_errno())))
    _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)
    for first, end in _written(fd, start, start + num_bytes):
        _libc.madvise(address + first - start, end - first, _MADV_POPULATE_READ)
    return memory


def _written(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a file, from a first byte to an end, that have been written, page by page."""
    with contextlib.suppress(OSError):  # nothing is written behind `start`
        while (start := os.lseek(fd, start, os.SEEK_DATA)) < end:
            hole = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, min(hole, end)
            start = hole


def _mapping(num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:  # a mapping cannot be empty
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_anonymous(num_bytes), dtype=torch.uint8)


def _anonymous(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(_CANNOT_MAP.format(num_bytes, error)) from error
    with contextlib.suppress(OSError):  # this kernel has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
