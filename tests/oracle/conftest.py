"""One small model that tests of edited logits share, in tpengine and in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import byte_llama
from support.oracle import Oracle

from tpengine import LLMEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    """The same model in transformers, with answers of 20 tokens."""
    return Oracle(folder, 20)


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[LLMEngine]:
    """One engine for all tests that need no special arguments."""
    with byte_llama.make_engine(folder) as engine:
        yield engine
