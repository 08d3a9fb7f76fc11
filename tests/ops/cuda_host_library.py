"""Compiles CUDA kernels for the CPU with the stand-in for CUDA in cuda_host/."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).parent / "cuda_host"
COMPILED = ROOT / "build" / "cuda_host"
P = ctypes.c_void_p
_TYPES = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_TYPES |= {"Offsets": ctypes.c_int}  # an enum
_FIELDS = re.compile(r"^  (?:const )?(\w+)(\*?) ([\w,\s]+);", re.MULTILINE)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@functools.cache
def struct(name: str) -> Any:
    """A struct that a header of `csrc/cuda` declares, as the arguments of a kernel."""
    headers = (path.read_text() for path in (ROOT / "csrc" / "cuda").rglob("*.cuh"))
    pattern = re.compile(rf"^struct {name} {{\n(.*?)^}};", re.MULTILINE | re.DOTALL)
    (body,) = (body for text in headers for body in pattern.findall(text))
    fields = []
    for kind, pointer, names in _FIELDS.findall(re.sub("//.*", "", body)):
        type_ = P if pointer else _TYPES.get(kind) or struct(kind)
        fields += [(field.strip(), type_) for field in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def compile_host(source: Path, *options: str) -> Path:
    """Compiles a source with the stand-in, unless a run before had the same files and options.
    Without optimization it takes half the time."""
    folders = (SOURCES, ROOT / "csrc" / "common", ROOT / "csrc" / "cuda")
    digest = hashlib.sha256(repr((options, source.name, source.read_bytes())).encode())
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    target = COMPILED / f"{source.stem}-{digest.hexdigest()[:20]}"
    if not target.exists():
        COMPILED.mkdir(parents=True, exist_ok=True)
        new = target.with_suffix(f".{os.getpid()}")  # two processes of pytest may compile it
        command = [
            *("g++", "-std=c++17", "-U_FORTIFY_SOURCE", *options),
            *(f"-I{folder}" for folder in folders),
            *("-x", "c++", str(source), "-o", str(new)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        new.replace(target)
    return target


def run_host(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a compiled program; returns what it wrote, and its exit code."""
    # Leaks belong to the stand-in, and the sanitizer does not know the stacks of its fibers.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment
    )


@functools.cache
def load_host(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_host(SOURCES / f"{name}.cpp", "-O1", "-shared", "-fPIC")))


def set_schedule(library: ctypes.CDLL, seed: int) -> None:
    """0: round-robin; else warps run ahead of each other. Asynchronous copies happen as late as
    allowed (even) or at once (odd)."""
    library.set_schedule(ctypes.c_uint64(seed))


FAR_BLOCKS = 3_000_000
"""Distance of a test's blocks from the beginning of an imagined cache; offsets in elements and
bytes do not fit into 32 bits."""


def far_pointer(cache: torch.Tensor) -> int:
    """Address at which a cache would begin whose blocks from `FAR_BLOCKS` on are in `cache`."""
    offset = FAR_BLOCKS * cache.stride(0)
    assert offset >= 1 << 32
    return cache.data_ptr() - offset * cache.element_size()


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
