"""Processes that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.models import ModelShop
from support.tiny_llama import TinyLlama

from distributed.ranks import Ranks
from distributed.worker_tasks import BLOCK_SIZE, VOCAB_SIZE
from tpengine import EngineArgs
from tpengine.config import EngineConfig

LLAMA = TinyLlama(
    head_dim=16,
    hidden_size=64,
    intermediate_size=45,  # not divisible by 2, 3 or 4; the last of 4 ranks has only padding
    vocab_size=VOCAB_SIZE,
    max_positions=128,
    bias=True,
)


@pytest.fixture(scope="session")
def config(models: ModelShop) -> EngineConfig:
    """Configuration of a small Llama in float32."""
    sizes = {"block_size": BLOCK_SIZE, "num_device_blocks_override": 32}
    args = EngineArgs(str(models.folder(LLAMA)), dtype="float32", **sizes)
    return args.create_engine_config("cpu")


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Ranks]]:
    """Connected ranks, by number of ranks; each group uses shared memory and gloo."""
    with Ranks(2) as two, Ranks(4) as four:
        for ranks in (two, four):
            for kind in ("shared memory", "gloo"):
                ranks.connect(kind)
        yield {2: two, 4: four}


@pytest.fixture
def two() -> Iterator[Ranks]:
    """Two new ranks, which the test may kill."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def three() -> Iterator[Ranks]:
    """Three new ranks, which the test may kill."""
    with Ranks(3) as ranks:
        yield ranks
