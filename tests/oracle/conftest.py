"""One small model that tests of edited logits share, in tpengine and in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import byte_llama
from transformers import LlamaForCausalLM

from tpengine import LLMEngine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Any:
    """The same model in transformers."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[LLMEngine]:
    """One engine for all tests that need no special arguments."""
    with byte_llama.make_engine(folder) as engine:
        yield engine
