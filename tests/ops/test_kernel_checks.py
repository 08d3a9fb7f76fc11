"""The program that compute-sanitizer runs on a GPU, compiled for the CPU stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cuda_host_library import compile_host, needs_compiler, run_host

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
    code, lines = run(program, "cache")
    assert (code, lines[-1]) == (0, "1 families of kernels, 0 wrong")


def test_a_misspelt_family_does_not_look_right(program: Path) -> None:
    assert run(program, "decoder") == (1, ["0 families of kernels, 0 wrong"])
