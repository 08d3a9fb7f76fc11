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


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory, the best of two readers."""
    data = huge_pages.empty((64, _BYTES // 4 // 64), torch.float32).zero_()
    out = torch.empty(64, dtype=torch.int64)
    seconds = min(fastest_s(data.sum), fastest_s(lambda: sampling.argmax(out, data)))
    return _BYTES / seconds
