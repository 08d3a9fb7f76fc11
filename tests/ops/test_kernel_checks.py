"""The program that compute-sanitizer runs on a GPU, compiled for the CPU stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .cuda_host_library import SOURCES, needs_compiler

PROGRAM = Path(__file__).parent / "cuda_program" / "kernel_checks.cu"
FAMILIES = ("decode", "cache", "blocks", "fused", "sampling")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kernel_checks") / "kernel_checks"
    command = ["g++", "-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-DTPENGINE_CUDA_HOST"]
    command += ["-I", str(SOURCES), "-x", "c++", str(PROGRAM), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(program: Path, *families: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [program, *families], capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout.splitlines()


@needs_compiler
def test_every_family_is_right(program: Path) -> None:
    code, lines = run(program)
    assert lines[-1] == f"{len(FAMILIES)} families of kernels, 0 wrong"
    assert len(lines) > 2 * len(FAMILIES)
    assert all(line.startswith("right ") for line in lines[:-1])
    assert code == 0


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
def test_one_family(program: Path, family: str) -> None:
    code, lines = run(program, family)
    assert (code, lines[-1]) == (0, "1 families of kernels, 0 wrong")


@needs_compiler
def test_a_misspelt_family_does_not_look_right(program: Path) -> None:
    assert run(program, "decoder") == (1, ["0 families of kernels, 0 wrong"])
