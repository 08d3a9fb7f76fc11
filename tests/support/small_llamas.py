"""Small random models, engines on them, and plain transformers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import make_engine as new_engine
from support.engines import serve
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from tpengine import LLMEngine
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams

VOCAB_SIZE = 256
_ALL = {"hidden_size": 64, "intermediate_size": 96, "max_positions": 256, "vocab_size": VOCAB_SIZE}
SHAPES = {
    "grouped": TinyLlama(16, 4, 2, seed=40, **_ALL),
    "equal": TinyLlama(32, 2, 2, seed=41, **_ALL),
    "single": TinyLlama(16, 4, 1, num_layers=3, seed=42, **_ALL),
}
MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="session")
def folders(models: ModelShop) -> dict[str, Path]:
    """A Llama of each shape."""
    return {name: models.folder(spec) for name, spec in SHAPES.items()}


@pytest.fixture(scope="session")
def oracles(models: ModelShop, folders: dict[str, Path]) -> dict[str, Any]:
    """The same models in transformers."""
    return {name: models.oracle(folder).model for name, folder in folders.items()}


@pytest.fixture
def make_engine(folders: dict[str, Path]) -> Iterator[MakeEngine]:
    """Makes engines of little memory; they are shut down when the test ends."""
    engines = []

    def make(model: str = "grouped", **args: Any) -> LLMEngine:
        args = {"max_model_len": 128, "block_size": 8, "swap_space": 0.0, **args}
        args = {"num_device_blocks_override": 200, "max_num_batched_tokens": 64, **args}
        engine = new_engine(folders[model], **{"max_num_seqs": 32, **args})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


Job = tuple[str, list[int], SamplingParams]


def run(engine: LLMEngine, jobs: list[Job]) -> dict[str, RequestOutput]:
    """Serves requests side by side; the last output of each."""
    names, prompts, params = zip(*jobs, strict=True)
    return dict(zip(names, serve(engine, prompts, params), strict=True))
