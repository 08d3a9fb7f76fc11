"""How much memory there is, and how much of it the KV cache may take."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from tpengine.worker import cgroups

GIB = 1 << 30
_CPU_DEFAULT_BYTES = 4 * GIB
_CPU_DEFAULT_SHARE = 0.4
_SWAP_DEFAULT_BYTES = 4 * GIB
_SWAP_DEFAULT_SHARE = 0.1


def cpu_total_bytes() -> int:
    """Memory of the machine, or of the cgroup where that is less."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in cgroups.memory_limits())])


def cpu_free_bytes() -> int:
    """What this process could still allocate, by machine and by cgroup."""
    limits = cgroups.memory_limits()
    return min([_meminfo("MemAvailable"), *(limit - used for limit, used in limits)])


def cpu_kv_budget_bytes(wanted: int | None) -> int:
    """Bytes for the KV cache on CPU: what was asked for, or a modest share of what is free."""
    if wanted is not None:
        return wanted
    return min(_CPU_DEFAULT_BYTES, int(_CPU_DEFAULT_SHARE * max(0, cpu_free_bytes())))


def host_swap_bytes() -> int:
    """Bytes of host memory for swapped blocks unless told: a modest share of what is free."""
    return min(_SWAP_DEFAULT_BYTES, int(_SWAP_DEFAULT_SHARE * max(0, cpu_free_bytes())))


class PeakMemory:
    """Measures how far memory rises above its start while a block of code runs.

    On CUDA by torch's allocator. On CPU by the resident set's high-water mark, which Linux resets
    on request; where it cannot be reset the figure is only a lower bound.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self._start_bytes = _status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _status("VmHWM")
        self.peak_bytes = max(0, peak - self._start_bytes)


def _read_kib(path: str, key: str) -> int:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0


def _meminfo(key: str) -> int:
    return _read_kib("/proc/meminfo", key)


def _status(key: str) -> int:
    return _read_kib("/proc/self/status", key)
