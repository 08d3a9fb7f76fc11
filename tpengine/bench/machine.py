"""What a benchmark was run on, for the head of its report."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from tpengine.engine_args import EngineArgs
from tpengine.errors import counted
from tpengine.ops.library import cpu_isa
from tpengine.worker.device import detect_device, resolve_dtype


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
