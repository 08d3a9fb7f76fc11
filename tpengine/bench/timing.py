"""Times of work, and the bandwidth of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tpengine.ops import fused_ops as fused
from tpengine.ops import huge_pages

_READ_BYTES = 1 << 29
COPY_BYTES = 2 << 30
REPEATS = 7

Action = Callable[[], object]


def events_s(action: Action) -> float:
    """Seconds of work on a GPU by CUDA events: the median of `REPEATS` calls."""
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy within a GPU reads and writes; it takes 4 GiB of its memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    return 2 * COPY_BYTES / events_s(lambda: target.copy_(source))


def fastest_s(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the fastest call, after a first call that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


class ReadBandwidth:
    """Bytes per second that all threads together read from memory.

    It keeps half a gigabyte of its own: more than any cache holds, and the first access to new
    memory would be slow.
    """

    def __init__(self) -> None:
        self._data = huge_pages.empty((64, _READ_BYTES // 4 // 64), torch.float32).zero_()
        self._out = torch.empty(64, dtype=torch.int64)

    def measure(self, repeats: int = REPEATS) -> float:
        """The best of two ways to read, each the fastest of `repeats` calls."""
        readers = (self._data.sum, lambda: fused.argmax(self._out, self._data))
        return _READ_BYTES / min(fastest_s(reader, repeats) for reader in readers)
