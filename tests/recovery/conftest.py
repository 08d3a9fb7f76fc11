"""Configurations of engines whose ranks can be lost."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import ModelShop
from support.tiny_llama import TinyLlama, edit_json
from support.zoo import PLAIN

from tpengine import EngineArgs
from tpengine.config import EngineConfig

FAKE_VOCAB = TinyLlama(
    head_dim=64, num_heads=1, num_kv_heads=1, hidden_size=64, num_layers=1, vocab_size=1000
)
"""Only its configuration is used; the vocabulary of the fake worker has 997 tokens."""

MakeConfig = Callable[..., EngineConfig]


def config_maker(folder: Path, **defaults: Any) -> MakeConfig:
    """Returns a function that makes configurations; its arguments replace `defaults`."""

    def make(**args: Any) -> EngineConfig:
        fields = {"max_recoveries": 1000, **defaults, **args}
        return EngineArgs(str(folder), **fields).create_engine_config("cpu")

    return make


@pytest.fixture(scope="session")
def fake_config(models: ModelShop) -> MakeConfig:
    """Makes configurations for the fake worker."""
    sizes = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return config_maker(models.folder(FAKE_VOCAB), block_size=8, **sizes)


@pytest.fixture(scope="session")
def real_config(models: ModelShop) -> MakeConfig:
    """Makes configurations for a real worker, with a tokenizer."""
    folder = models.folder(PLAIN, tokenizer=True)
    return config_maker(folder, dtype="float32", max_model_len=128, max_num_seqs=32)


@pytest.fixture(scope="session")
def window_config(models: ModelShop, tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """The same for a Mistral with the same weights, whose tokens see 40 tokens."""
    folder = tmp_path_factory.mktemp("window") / "model"
    shutil.copytree(models.folder(PLAIN, tokenizer=True), folder)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    edit_json(folder / "config.json", lambda config: config.update(mistral, sliding_window=40))
    return config_maker(folder, dtype="float32", max_model_len=128, max_num_seqs=32)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keeps the log lines of thousands of losses away."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
