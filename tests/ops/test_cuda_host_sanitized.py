"""The CUDA kernels on the CPU stand-in under AddressSanitizer, with buffers of exact sizes; and
whether loads of several elements are aligned, on which a GPU insists and a CPU does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .cuda_host_library import compile_host, needs_compiler

pytestmark = needs_compiler


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Leaks belong to the stand-in, and the sanitizer does not know the stacks of its fibers.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def test_kernels_stay_inside_their_memory(tmp_path: Path) -> None:
    program = tmp_path / "sanitized"
    options = (
        "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment",
        "--param=asan-stack=0",
    )  # fmt: skip
    compile_host("sanitized", program, *options, shared=False)
    done = _run(program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout == "done\n"
    beyond = _run(program, "one element beyond a row")
    assert beyond.returncode != 0
    assert "heap-buffer-overflow" in beyond.stderr
