"""Host memory in pages of 2 MiB, for what every step reads from end to end.

With ordinary pages of 4 KiB a stream through gigabytes of weights misses the TLB all the time, and
on a virtual machine each miss walks two tables. Linux gives large pages to those who ask
(`madvise`), and only where a whole aligned one fits: so many tensors share one mapping.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in a mapping of its own; untouched pages take no memory.

    Raises:
        MemoryError: the machine will not promise as much.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return _mapping(num_bytes)[:num_bytes].view(dtype).view(shape)


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
