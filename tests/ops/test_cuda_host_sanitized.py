"""The CUDA kernels on the CPU stand-in under AddressSanitizer, with buffers of exact sizes; and
whether loads of several elements are aligned, on which a GPU insists and a CPU does not."""

from __future__ import annotations

import pytest

from .cuda_host_library import SOURCES, compile_host, needs_compiler, run_host

pytestmark = [needs_compiler, pytest.mark.check]


def test_kernels_stay_inside_their_memory() -> None:
    options = (
        "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment",
        "--param=asan-stack=0",
    )  # fmt: skip
    program = compile_host(SOURCES / "sanitized.cpp", *options)
    done = run_host(program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout == "done\n"
    beyond = run_host(program, "one element beyond a row")
    assert beyond.returncode != 0
    assert "heap-buffer-overflow" in beyond.stderr
