"""Processes that tests share, and a check that no file is left in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from distributed.ranks import Ranks
from distributed.worker_tasks import BLOCK_SIZE, VOCAB_SIZE
from tpengine import EngineArgs
from tpengine.config import EngineConfig
from tpengine.distributed.shared_memory import SHM_FOLDER

INTERMEDIATE_SIZE = 45
"""Not divisible by 2, 3 or 4; the last of 4 ranks has only padding."""


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Configuration of a small Llama in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    llama = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        mlp_bias=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    args = EngineArgs(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, num_device_blocks_override=32
    )
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


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """A segment has no name once its ranks are connected: none is left of killed ranks."""
    yield
    assert not list(SHM_FOLDER.glob(f"tpengine-{os.getpid()}_*"))
