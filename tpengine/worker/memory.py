"""How much memory there is, and how much of it the KV cache may take."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import torch

from tpengine.config import CacheConfig
from tpengine.worker import cgroups

GIB = 1 << 30
_CPU_DEFAULT_BYTES = 4 * GIB
_CPU_DEFAULT_SHARE = 0.4
_SWAP_DEFAULT_BYTES = 4 * GIB
_SWAP_DEFAULT_SHARE = 0.1
_POPULATE_PART = 16
_DRIVER_BYTES = 64 << 20
"""More than a graph of thousands of kernels takes beside its tensors."""


def cpu_total_bytes() -> int:
    """Memory of the machine, or of the cgroup where that is less."""
    return min([_meminfo("MemTotal"), *(limit for limit, _ in cgroups.memory_limits())])


def cpu_free_bytes() -> int:
    """What this process could still allocate, by machine and by cgroup."""
    limits = cgroups.memory_limits()
    return min([_meminfo("MemAvailable"), *(limit - used for limit, used in limits)])


def cpu_held_by_others_bytes() -> int:
    """What other processes hold of the memory, so that this one cannot have it."""
    own = _status("RssAnon") + _status("RssShmem")  # file pages can be given back
    return max(0, cpu_total_bytes() - max(0, cpu_free_bytes()) - own)


def held_by_others_bytes(device: torch.device) -> int:
    """What other processes hold of a device's memory; on a GPU with this one's CUDA context."""
    if device.type == "cpu":
        return cpu_held_by_others_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def kv_budget_bytes(
    device: torch.device, config: CacheConfig, num_local_ranks: int, reserved: int
) -> tuple[int, int]:
    """(all memory of the device, what the KV cache of one rank may take), in bytes.

    Args:
        num_local_ranks: ranks of the engine that share a CPU's memory.
        reserved: see `cuda_kv_budget_bytes`.
    """
    if device.type == "cpu":
        wanted = config.cpu_kv_cache_bytes
        return cpu_total_bytes(), cpu_kv_budget_bytes(wanted, num_local_ranks)
    free, total = torch.cuda.mem_get_info(device)
    share = config.gpu_memory_utilization
    return total, cuda_kv_budget_bytes(total, free, share, reserved)


def cpu_kv_budget_bytes(wanted: int | None, num_local_ranks: int = 1) -> int:
    """Bytes for the KV cache of one rank on CPU: what was asked for, or its part of a modest
    share of what is free.

    Args:
        num_local_ranks: ranks of the engine that share this machine's memory.
    """
    if wanted is not None:
        return wanted
    return _share_of_free(_CPU_DEFAULT_BYTES, _CPU_DEFAULT_SHARE, num_local_ranks)


def host_swap_bytes(wanted: int | None, num_local_ranks: int = 1) -> int:
    """The same for the host memory of swapped blocks."""
    if wanted is not None:
        return wanted
    return _share_of_free(_SWAP_DEFAULT_BYTES, _SWAP_DEFAULT_SHARE, num_local_ranks)


def populate_bytes(num_local_ranks: int) -> int:
    """Bytes of one rank's KV cache on CPU that may have their memory from the start: little, as a
    cache that was made larger than the memory does its work while not much of it is used."""
    return max(0, cpu_free_bytes()) // _POPULATE_PART // num_local_ranks


def _share_of_free(at_most: int, share: float, num_local_ranks: int) -> int:
    return min(at_most, int(share * max(0, cpu_free_bytes()))) // num_local_ranks


def cuda_kv_budget_bytes(total: int, free: int, share: float, reserved: int) -> int:
    """Bytes for the KV cache of one rank on a GPU.

    What others hold counts against the share, whether it came before or after this process; that
    it changed in the meantime is no reason to stop.

    Args:
        total, free: of the device's memory, now that weights and the like are in it.
        share: gpu_memory_utilization.
        reserved: what is still to come beside the cache: activations, graphs, staging.
    """
    unusable = total - int(total * share)
    return max(0, free - unusable - reserved)


def cuda_peak_bytes(device: torch.device) -> int:
    """The most that torch held at once since the last `PeakMemory` began; 0 on CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def how_to_get_more(device: torch.device, one_block: int) -> str:
    """What a user can do where no block fits.

    Args:
        one_block: its bytes.
    """
    if device.type == "cpu":
        needed = math.ceil(1e6 * one_block / GIB) / 1e6  # the named value must do
        return f"raise cpu_kv_cache_space to at least {needed:.6f} (GiB)"
    return (
        "raise gpu_memory_utilization, free memory on the device, or lower "
        "max_num_batched_tokens or max_num_seqs, whose worst step is set aside"
    )


class CudaGrowth:
    """What this process takes of a GPU from now on, for good.

    By torch's allocator, and for what drivers take beside it by the device's free memory, which
    other processes change too: that part is believed up to `_DRIVER_BYTES`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved, self._free = self._measure()

    def num_bytes(self) -> int:
        """Bytes since the start; at least 0."""
        reserved, free = self._measure()
        own = max(0, reserved - self._reserved)
        return own + min(max(0, self._free - free - own), _DRIVER_BYTES)

    def _measure(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]


class PeakMemory:
    """Measures how far memory rises above its start while a block of code runs.

    On CUDA by torch's allocator. On CPU by the resident set's high-water mark, which Linux resets
    on request; where it cannot be reset the figure is only a lower bound.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.start_bytes = torch.cuda.memory_allocated(self._device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self.start_bytes = _status("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = _status("VmHWM")
        self.peak_bytes = max(0, peak - self.start_bytes)


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
