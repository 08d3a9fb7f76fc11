"""What benchmarks share: the head of a report, the speed of memory, plots."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError, counted
from tpengine.ops import fused, huge_pages
from tpengine.ops.library import cpu_isa
from tpengine.worker.device import detect_device, resolve_dtype

_BYTES = 1 << 29
_REPEATS = 7


def report_head(args: EngineArgs, width: int = 20) -> str:
    """Lines that say what was measured where, and how to do it again.

    Args:
        width: of the column of names.
    """
    lines = {
        "machine": describe_machine(),
        "commit": describe_commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "settings": describe_run(args),
    }
    return "\n".join(f"{name:<{width}s}{text}" for name, text in lines.items())


def describe_run(args: EngineArgs) -> str:
    """Device, dtype and quantization of an engine with these arguments, `auto` settled."""
    device = detect_device(args.device)
    dtype = str(resolve_dtype(args.dtype, device)).removeprefix("torch.")
    return f"device {device}, dtype {dtype}, quantization {args.quantization or 'none'}"


def describe_machine() -> str:
    """CPU (or GPU), cores, threads, instruction set and torch, in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"{_cpu_name()}, {counted(torch.get_num_threads(), 'thread')}, {cpu_isa()} kernels, "
        f"torch {torch.__version__}"
    )


def describe_commit() -> str:
    """Version of the code: the git commit, marked when files differ from it, or 'unknown'."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (not a git checkout)"
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
        readers = (self._data.sum, lambda: fused.argmax(self._out, self._data))
        return _BYTES / min(fastest_s(reader, repeats) for reader in readers)


def import_pyplot() -> Any:
    """matplotlib's pyplot, for files rather than screens. Whoever measures for a plot calls this
    first: it must not fail after the measurement.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--plot out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
