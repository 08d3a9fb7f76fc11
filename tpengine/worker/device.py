"""A worker's device: choice, dtypes, CPU threads, memory, and how much of it the KV cache takes.

On CPU the limit is the machine's or that of the tightest control group (cgroup, version 1 or 2).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tpengine import envs
from tpengine.config import CacheConfig, lacks_arithmetic
from tpengine.errors import ConfigError
from tpengine.ops.library import cpu_isa, has_cpu_kernels

GIB = 1 << 30
_PAUSE_SOFT = 1
_DEFAULT_BYTES = 4 * GIB
"""Most that the ranks of a machine take for the KV cache, and for swap, unless told otherwise."""
KV_SHARE, SWAP_SHARE = 0.4, 0.1
_POPULATE_PART = 16
_CGROUP_ROOT = "/sys/fs/cgroup"


def detect_device(wanted: str) -> str:
    """Returns "cpu" or "cuda" for the user's "auto", "cpu" or "cuda".

    Raises:
        ConfigError: cuda was asked for, but torch cannot use it.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(f"device = 'cuda', but {_why_no_cuda()}; or use device='cpu'")
    if wanted == "auto":
        return "cuda" if available else "cpu"
    return wanted


def count_gpus() -> int:
    """Returns the number of GPUs that torch sees."""
    return torch.cuda.device_count()


def claim_gpu(device: torch.device) -> str:
    """Makes a GPU the current one of this process; returns its name.

    Raises:
        ConfigError: this rank's node has none, whatever the driver's has.
    """
    detect_device(device.type)
    torch.cuda.set_device(device)
    return torch.cuda.get_device_name(device)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP library that torch has loaded; None: it has another one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = [line.split(maxsplit=5)[5] for line in lines if "libgomp" in line]
        return ctypes.CDLL(paths[0]) if paths else None
    except OSError:
        return None


def end_openmp_team() -> None:
    """Ends the threads that torch has used for products of the calling thread.

    If two threads had such teams, there would be more threads than cores. libgomp then lets none of
    them spin between products, and steps of small models take 1.4 times as long.
    """
    if (library := _openmp()) is not None:
        library.omp_pause_resource_all(_PAUSE_SOFT)


def resolve_dtype(wanted: str, device: str) -> torch.dtype:
    """Returns the dtype of weights and activations; "auto" is bfloat16 if the device supports it.

    A dtype that the device has no arithmetic for is as "auto".
    """
    if wanted != "auto" and not lacks_arithmetic(wanted, device):
        chosen: torch.dtype = getattr(torch, wanted)  # torch knows "float" and "half" too
        return chosen
    # A CPU without bfloat16 instructions converts at every step, which costs more than it saves.
    has_bf16 = (
        cpu_isa() in ("amx", "avx512bf16") if device == "cpu" else torch.cuda.is_bf16_supported()
    )
    return torch.bfloat16 if has_bf16 else torch.float32


def _why_no_cuda() -> str:
    """Says why torch cannot use a GPU, and what to change."""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA: install one with it, as "
            "`pip install torch` does by default"
        )
    built = f"torch {torch.__version__} (for CUDA {torch.version.cuda})"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (
            f"{built} cannot use a GPU: {str(error).strip()}; update the driver, or install a "
            "torch that was built for the CUDA version which `nvidia-smi` names"
        )
    return f"{built} sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"


def cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the KV cache for `CacheConfig.kv_cache_dtype` and the model's dtype."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(wanted, dtype)


def keeps_stored(dtype: str, quantization: str | None, device: str) -> bool:
    """Whether matrices of a quantised file keep its numbers: on CPUs with compiled kernels, unless
    the user chose float32 or another quantization."""
    is_open = quantization is None and getattr(torch, dtype, None) is not torch.float32
    return device == "cpu" and has_cpu_kernels() and is_open


def set_num_threads(local_ranks: int) -> int:
    """Sets the number of CPU threads of this process, and returns it.

    The environment decides. Without it a rank gets its share of the cores that it may run on and of
    the CPU time that its cgroups grant: threads beyond a quota are stopped for most of each period.
    """
    threads = envs.num_threads() or envs.omp_num_threads()
    if threads is None:
        threads = max(1, _usable_cores() // local_ranks)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def _usable_cores() -> int:
    cores, quota = len(os.sched_getaffinity(0)), cpu_limit()
    return cores if quota is None else min(cores, math.ceil(quota))


def kv_budget_bytes(
    device: torch.device, config: CacheConfig, num_local_ranks: int, reserved: int
) -> tuple[int, int]:
    """Returns (all memory of the device, what the KV cache of one rank may take), in bytes.

    Args:
        num_local_ranks: ranks of the engine that share a CPU's memory.
        reserved: see `cuda_kv_budget_bytes`.
    """
    if device.type == "cpu":
        wanted = config.cpu_kv_cache_bytes
        return cpu_total_bytes(), host_budget_bytes(wanted, KV_SHARE, num_local_ranks)
    free, total = torch.cuda.mem_get_info(device)
    return total, cuda_kv_budget_bytes(total, free, config.gpu_memory_utilization, reserved)


def host_budget_bytes(wanted: int | None, share: float, num_local_ranks: int = 1) -> int:
    """Returns bytes of the host's memory for the blocks of one rank: what the user asked for, or
    the rank's part of a modest share of the free memory.

    Args:
        share: `KV_SHARE` for the KV cache on CPU, `SWAP_SHARE` for swapped blocks.
        num_local_ranks: ranks of the engine that share this machine's memory.
    """
    if wanted is not None:
        return wanted
    return min(_DEFAULT_BYTES, int(share * max(0, cpu_free_bytes()))) // num_local_ranks


def populate_bytes(num_local_ranks: int) -> int:
    """Returns the bytes of one rank's KV cache on CPU that get their memory at the start. It is a
    small part: a cache that is larger than the memory works as long as little of it is used."""
    return max(0, cpu_free_bytes()) // _POPULATE_PART // num_local_ranks


def cuda_kv_budget_bytes(total: int, free: int, share: float, reserved: int) -> int:
    """Returns bytes for the KV cache of one rank on a GPU.

    Memory of other processes counts against the share, no matter when they took it.

    Args:
        total, free: of the device's memory, with the weights already in it.
        share: gpu_memory_utilization.
        reserved: what the engine will still take besides the cache: activations, graphs, staging.
    """
    unusable = total - int(total * share)
    return max(0, free - unusable - reserved)


def how_to_get_more(device: torch.device, one_block: int) -> str:
    """Tells a user what to change if no block fits.

    Args:
        one_block: bytes of a block.
    """
    if device.type == "cpu":
        needed = math.ceil(1e6 * one_block / GIB) / 1e6  # rounded up: the named value is enough
        return f"raise cpu_kv_cache_space to at least {needed:.6f} (GiB)"
    return (
        "raise gpu_memory_utilization, free memory on the device, or lower "
        "max_num_batched_tokens or max_num_seqs, whose worst step is set aside"
    )


def cpu_total_bytes() -> int:
    """Returns the memory of the machine, or the limit of the cgroup if that is less."""
    return min([_proc_bytes("meminfo", "MemTotal"), *(limit for limit, _ in _cgroup_memory())])


def cpu_free_bytes() -> int:
    """Returns what this process could still allocate; negative if a cgroup is over its limit."""
    left = (limit - used for limit, used in _cgroup_memory())
    return min([_proc_bytes("meminfo", "MemAvailable"), *left])


def held_by_others_bytes(device: torch.device, kept_bytes: int = 0) -> int:
    """Returns what other processes hold of a device's memory; on a GPU this includes the CUDA
    context of this process.

    Args:
        kept_bytes: of a GPU, which this process holds without torch's allocator.
    """
    if device.type == "cpu":
        # File pages can be given back.
        own = _proc_bytes("self/status", "RssAnon") + _proc_bytes("self/status", "RssShmem")
        return max(0, cpu_total_bytes() - max(0, cpu_free_bytes()) - own)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device) - kept_bytes)


def cuda_peak_bytes(device: torch.device) -> int:
    """Returns the most that torch held at once since the last `PeakMemory` began; 0 on CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


class PeakMemory:
    """Measures how far memory rises above its start while a block of code runs.

    On CUDA torch's allocator reports it. On CPU it is the resident set's high-water mark, which
    Linux resets on request; without the reset the result is only a lower bound.
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
            self.start_bytes = _proc_bytes("self/status", "VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        on_gpu = self._device.type == "cuda"
        peak = cuda_peak_bytes(self._device) if on_gpu else _proc_bytes("self/status", "VmHWM")
        self.peak_bytes = max(0, peak - self.start_bytes)


def cpu_limit() -> float | None:
    """Returns the number of CPUs whose time the tightest cgroup grants; None: no limit."""
    limits = []
    for folder, is_v2 in _cgroups("cpu"):
        if is_v2:
            quota, period = [*_read_words(folder / "cpu.max"), "", ""][:2]
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ("".join(_read_words(folder / name)) for name in names)
        if quota.isdecimal() and period.isdecimal() and int(period):  # else absent, "max" or -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _cgroup_memory() -> list[tuple[int, int]]:
    """Returns (limit, used) in bytes of every cgroup above this process that sets a limit.

    The kernel counts cached file pages as used, but gives them back when a process needs memory. A
    model that was just read from disk would otherwise fill its container.
    """
    limits = []
    for folder, is_v2 in _cgroups("memory"):
        if is_v2:
            names, prefix = ("memory.max", "memory.current"), ""
        else:
            names, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        limit, used = ("".join(_read_words(folder / name)) for name in names)
        if limit.isdecimal() and used.isdecimal():  # else absent, or "max"
            pages = (f"{prefix}active_file", f"{prefix}inactive_file")  # without shared memory
            counts = dict(line.partition(" ")[::2] for line in _read_lines(folder / "memory.stat"))
            cached = sum(int(counts.get(name, "0")) for name in pages)
            limits.append((int(limit), max(0, int(used) - cached)))
    return limits


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields (folder, whether it is of version 2) of this process's cgroups, up to the root."""
    for line in _read_lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = Path(_CGROUP_ROOT)
        elif controller in controllers.split(","):
            root = Path(f"{_CGROUP_ROOT}/{controller}")
        else:
            continue
        folder = root / path.lstrip("/")
        for parent in (folder, *folder.parents):
            yield parent, controllers == ""
            if parent == root:
                break


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_words(path: Path) -> list[str]:
    return " ".join(_read_lines(path)).split()


def _proc_bytes(file: str, key: str) -> int:
    """Returns the bytes that a file of /proc names by a key."""
    lines = Path(f"/proc/{file}").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0) * 1024
