"""The programs that check the CUDA kernels' memory, on the CPU stand-in: the one that
compute-sanitizer runs on a GPU, and one for AddressSanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cuda_host_library import SOURCES, compile_host, needs_compiler, run_host

pytestmark = needs_compiler
PROGRAM = Path(__file__).parent / "cuda_program" / "kernel_checks.cu"
FAMILIES = ("decode", "cache", "blocks", "fused", "sampling", "weights", "lora")


@pytest.fixture(scope="module")
def program() -> Path:
    return compile_host(PROGRAM, "-DTPENGINE_CUDA_HOST")


def run(program: Path, *families: str) -> tuple[int, list[str]]:
    done = run_host(program, *families)
    return done.returncode, done.stdout.splitlines()


def test_every_family_is_right(program: Path) -> None:
    code, lines = run(program)
    assert lines[-1] == f"{len(FAMILIES)} families of kernels, 0 wrong"
    assert len(lines) > 2 * len(FAMILIES)
    assert all(line.startswith("right ") for line in lines[:-1])
    assert code == 0


def test_one_family(program: Path) -> None:
    """One that is misspelt does not look right."""
    code, lines = run(program, "cache")
    assert (code, lines[-1]) == (0, "1 families of kernels, 0 wrong")
    assert run(program, "decoder") == (1, ["0 families of kernels, 0 wrong"])


@pytest.mark.check
def test_kernels_stay_inside_their_memory() -> None:
    """With buffers of exact sizes; and loads of several elements are aligned, on which a GPU
    insists and a CPU does not."""
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
