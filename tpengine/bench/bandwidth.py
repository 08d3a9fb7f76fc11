"""How fast this machine reads memory: the floor under every decode step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tpengine.ops import huge_pages, sampling

_BYTES = 1 << 29
_REPEATS = 7


def fastest_s(action: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Seconds of the fastest of several calls, after one that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


class ReadBandwidth:
    """Bytes per second that all threads together read from memory.

    Reads half a gigabyte of its own: far more than any cache holds, and kept, as a first touch of
    memory is slow.
    """

    def __init__(self) -> None:
        self._data = huge_pages.empty((64, _BYTES // 4 // 64), torch.float32).zero_()
        self._out = torch.empty(64, dtype=torch.int64)

    def measure(self, repeats: int = _REPEATS) -> float:
        """The best of two readers, each the fastest of `repeats` times."""
        readers = (self._data.sum, lambda: sampling.argmax(self._out, self._data))
        return _BYTES / min(fastest_s(reader, repeats) for reader in readers)
