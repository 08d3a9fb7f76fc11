"""What a benchmark was run on, for the head of its report."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from tpengine.ops.library import cpu_isa


def describe_machine() -> str:
    """CPU (or GPU), cores, threads, instruction set and torch, in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"{_cpu_name()}, {torch.get_num_threads()} threads, {cpu_isa()} kernels, "
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
