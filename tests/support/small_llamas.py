"""Small random Llamas, and engines of little memory on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.engines import make_engine as new_engine
from support.engines import serve
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from tpengine import LLMEngine, RequestOutput, SamplingParams

VOCAB_SIZE = 256
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_positions": 256}
_SIZES |= {"vocab_size": VOCAB_SIZE}
SHAPES = {
    "grouped": TinyLlama(16, 4, 2, seed=46, **_SIZES),
    "equal": TinyLlama(32, 2, 2, seed=50, **_SIZES),
    "single": TinyLlama(16, 4, 1, num_layers=3, seed=47, **_SIZES),
}
MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make_engine(models: ModelShop) -> Iterator[MakeEngine]:
    """Makes engines of little memory; they are shut down when the test ends."""
    engines = []

    def make(model: str = "grouped", **args: Any) -> LLMEngine:
        args = {"max_model_len": 128, "block_size": 8, "swap_space": 0.0, **args}
        args = {"num_device_blocks_override": 200, "max_num_batched_tokens": 64, **args}
        engines.append(new_engine(models.folder(SHAPES[model]), **{"max_num_seqs": 32, **args}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


Job = tuple[str, list[int], SamplingParams]


def run(engine: LLMEngine, jobs: list[Job]) -> dict[str, RequestOutput]:
    """Serves requests side by side; the last output of each."""
    names, prompts, params = zip(*jobs, strict=True)
    return dict(zip(names, serve(engine, prompts, params), strict=True))
