"""Chooses a worker's device, its dtypes and its CPU threads."""

from __future__ import annotations

import math
import os

import torch

from tpengine import envs
from tpengine.errors import ConfigError
from tpengine.ops.library import cpu_isa
from tpengine.worker.memory import cpu_limit

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}


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


def resolve_dtype(wanted: str, device: str) -> torch.dtype:
    """Returns the dtype of weights and activations; "auto" is bfloat16 if the device supports it.

    Raises:
        ConfigError: float16 on CPU.
    """
    if wanted in ("float16", "half") and device == "cpu":
        raise ConfigError(
            f"dtype = {wanted!r} is not supported on CPU, which has no arithmetic for it and would "
            "convert at every step; use bfloat16 or float32"
        )
    if wanted != "auto":
        return _DTYPES[wanted]
    # A CPU without bfloat16 instructions converts at every step, which costs more than it saves.
    has_bf16 = cpu_isa() == "avx512bf16" if device == "cpu" else torch.cuda.is_bf16_supported()
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
    return torch.float8_e4m3fn if wanted == "fp8" else dtype


def check_quantization(wanted: str | None, device: str) -> None:
    """Raises ConfigError if the device has no kernels for a quantization."""
    if wanted is not None and device != "cpu":
        raise ConfigError(
            f"quantization = {wanted!r} has kernels for CPUs only, the device is {device}; leave "
            "it unset"
        )


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
