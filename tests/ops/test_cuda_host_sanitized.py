"""The CUDA kernels on the CPU stand-in under AddressSanitizer: a few cases of each, in a process of
their own, for the sanitizer has to be loaded before everything else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .cuda_host_library import SANITIZE, needs_compiler

pytestmark = needs_compiler

CHOSEN = (
    "(odd and rows and not of) or (plain_kernel and float16) or plans_are_complete and 3"
    " or (rotary and bfloat16 and 20 and True) or blocks_are or (gather and bfloat16)"
    " or (rms_norm and float16-1) or (gated and silu and bfloat16) or ends_of_the_uniform"
)


def _sanitizer() -> str:
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return found.stdout.strip()


def _run(chosen: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    environment = {
        **os.environ,
        SANITIZE: "1",
        "LD_PRELOAD": _sanitizer(),
        # The interpreter's own leaks, and fibers, whose stacks the sanitizer does not know.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    files = [
        str(here / f"test_cuda_host_{name}.py") for name in ("attention", "elementwise", "sampling")
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *files, "-k", chosen],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
        cwd=here.parents[1],
    )  # fmt: skip


def test_kernels_stay_inside_their_memory() -> None:
    done = _run(CHOSEN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR: AddressSanitizer" not in done.stdout + done.stderr
    assert " passed" in done.stdout
