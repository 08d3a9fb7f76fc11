"""Servers that the tests of several files share, each in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server_process import ServerProcess, serving
from support.small_llavas import write_llava
from tpengine import LLM

MODEL_LENGTH = 2048
LASTING = 1900
"""Tokens of a request that still runs when a client comes back that waited for a processor."""
TIGHT_BLOCKS = 136
"""Blocks of 16 tokens: room for the longest sequence, and little more."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two doors and room for many requests, on the embedded model in float32. It
    does not look ahead, as tests ask it the same thing again and watch an answer being made."""
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--swap-space", "0.01"]
    options += ["--http-port", "0", "--max-model-len", str(MODEL_LENGTH)]
    with serving(tmp_path_factory.mktemp("server"), *options) as process:
        yield process


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that is soon full: two requests run, two wait, few blocks, no prefix cache."""
    options = ["--dtype", "float32", "--max-model-len", str(MODEL_LENGTH), "--swap-space", "0"]
    options += ["--num-device-blocks-override", str(TIGHT_BLOCKS), "--max-num-seqs", "2"]
    options += ["--max-queued-requests", "2", "--max-num-batched-tokens", "16"]
    options += ["--no-enable-prefix-caching", "--scheduling-policy", "priority"]
    with serving(tmp_path_factory.mktemp("tight"), *options) as process:
        yield process


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two doors whose model reads pictures; its log lies in the model's folder."""
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--http-port", "0"]
    options += ["--served-model-name", "llava", "--resume-window", "60"]
    with serving(folder, "--model", str(folder), *options) as process:
        yield process


@pytest.fixture(scope="session")
def seeing_llm(seeing: ServerProcess) -> Iterator[LLM]:
    """The offline engine with the model of `seeing`."""
    with LLM(seeing.log.parent, dtype="float32", cpu_kv_cache_space=0.05) as llm:
        yield llm


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The offline engine with the model and the length of `server`."""
    with LLM(dtype="float32", cpu_kv_cache_space=0.05, max_model_len=MODEL_LENGTH) as llm:
        yield llm
