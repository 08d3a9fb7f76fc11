"""What a process leaves in a rank's memory, and what another one finds there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs
from tpengine.config import EngineConfig
from tpengine.errors import TemporaryError
from tpengine.layers.attention import AttentionMetadata
from tpengine.messages import BlockMoves
from tpengine.worker.cache_engine import CacheEngine, CacheShape
from tpengine.worker.rank_memory import RankMemory
from tpengine.worker.worker import Worker


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def config(models: ModelShop) -> EngineConfig:
    return EngineArgs(str(models.folder(PLAIN)), device="cpu").create_engine_config("cpu")


def test_tensors_are_found_again(file: int, config: EngineConfig) -> None:
    """Views of one memory stay that; strides, offsets, sizes of 0 and other objects, too."""
    whole = torch.arange(60.0).view(6, 10)
    shared = object()
    state = {
        "views": [whole[1:3], whole.t()[2:5], whole],
        "same": whole,
        "empty": torch.empty(0, 7, dtype=torch.int8),
        "bits": torch.arange(5, dtype=torch.bfloat16)[1:],
        "elsewhere": torch.empty(4, 3, device="meta")[1:, 1],
        "op": torch.ops.aten.relu.default,
        "shared": shared,
    }
    views: Any = state["views"]
    copies = [(view.clone(), view.stride()) for view in views]
    memory = RankMemory(file, config, 1)
    assert memory.load({}) is None
    assert memory.save(state, {"other": shared})
    again: Any = RankMemory(file, config, 1).load({"other": 5})
    for view, (copy, strides) in zip(again["views"], copies, strict=True):
        assert view.stride() == strides
        assert torch.equal(view, copy)
    assert again["same"] is again["views"][2]
    assert again["empty"].shape == (0, 7)
    assert again["bits"].tolist() == [1.0, 2.0, 3.0, 4.0]
    elsewhere = again["elsewhere"]
    assert elsewhere.is_meta
    assert (elsewhere.shape, elsewhere.stride(), elsewhere.storage_offset()) == ((3,), (3,), 4)
    assert (again["op"], again["shared"]) == (torch.ops.aten.relu.default, 5)
    again["views"][0][0, 0] = -1.0  # one memory for the process that saved, and for the other one
    assert whole[1, 0] == again["same"][1, 0] == -1.0


def test_what_cannot_be_noted_is_not_moved(file: int, config: EngineConfig) -> None:
    tensor = torch.ones(3)
    place = tensor.data_ptr()
    memory = RankMemory(file, config, 0)
    assert not memory.save([tensor, lambda: None], {})
    assert tensor.data_ptr() == place
    assert RankMemory(file, config, 0).load({}) is None


def test_sections_keep_their_content(file: int, config: EngineConfig) -> None:
    memory = RankMemory(file, config, 0)
    memory.section("a", 5000).fill_(7)
    memory.section("b", 3).fill_(8)
    memory.moves_done = 1 << 40
    other = RankMemory(file, config, 0)
    assert other.moves_done == 1 << 40
    assert set(other.section("a", 5000).tolist()) == {7}
    assert other.section("b", 3).tolist() == [8, 8, 8]
    assert other.section("none", 0).numel() == 0
    with pytest.raises(TemporaryError, match="number of bytes of a is 5000, and not 6000"):
        other.section("a", 6000)
    other.drop("a")
    assert set(other.section("a", 6000).tolist()) == {0}


@pytest.mark.parametrize(
    ("seed", "owner", "what"),
    [
        (0, (1, "e", 3), "rank is 0, and not 1"),
        (0, (0, "f", 3), "engine is 'e', and not 'f'"),
        (0, (0, "e", 4), "epoch is 3, and not 4"),
        (5, (0, "e", 3), "configuration"),
    ],
)
def test_memory_of_others_is_not_used(
    file: int, config: EngineConfig, models: ModelShop, seed: int, owner: Any, what: str
) -> None:
    RankMemory(file, config, 0, "e", 3).section("a", 100).fill_(7)
    other = EngineArgs(str(models.folder(PLAIN)), device="cpu", seed=seed)
    with pytest.raises(TemporaryError, match=f"not used: its {what}"):
        RankMemory(file, other.create_engine_config("cpu"), *owner)
    assert set(RankMemory(file, config, 0, "e", 3).section("a", 100).tolist()) == {7}
    os.pwrite(file, b"\x00", 60)  # within the index
    with pytest.raises(TemporaryError, match="not used: its index"):
        RankMemory(file, config, 0, "e", 3)


def test_moves_of_a_step_are_not_repeated(file: int, config: EngineConfig) -> None:
    """A step is sent again after a part of it has written into a block that it swaps out."""
    sizes = CacheShape(torch.device("cpu"), torch.float32, 8, 2, 2, 16), 8, 5
    first = CacheEngine(*sizes, RankMemory(file, config, 0))
    for number, (k_cache, v_cache) in enumerate(first.kv_caches):
        k_cache.fill_(number)
        v_cache.fill_(number + 10)
    moves = BlockMoves(swap_outs=[(1, 3)], copies=[(2, 1)])
    first.move(moves, 7)
    first.kv_caches[0][0][1:3].fill_(-1.0)
    second = CacheEngine(*sizes, RankMemory(file, config, 0))
    second.move(moves, 7)
    assert (second.kv_caches[0][0][1:3] == -1.0).all()
    second.move(BlockMoves(swap_ins=[(3, 4)]), 8)
    for number, (k_cache, v_cache) in enumerate(second.kv_caches):
        assert (k_cache[4] == number).all()
        assert (v_cache[4] == number + 10).all()


def test_a_rank_takes_over_what_another_has_loaded(file: int, config: EngineConfig) -> None:
    """Without the checkpoint, which is not there any more."""
    first = loaded(config, file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpengine.worker.worker.load_model", None)
        second = loaded(config, file)
    token_ids, metadata = torch.tensor([5], dtype=torch.int32), one_row()
    answers = []
    for worker in (first, second):
        worker.init_cache_engine(8)
        runner: Any = worker._runner
        caches = runner.cache_engine.kv_caches
        with torch.inference_mode():
            answers.append(runner.model.forward(token_ids, caches, metadata).clone())
    assert torch.equal(*answers)
    assert first.load_model() == second.load_model()


def loaded(config: EngineConfig, file: int) -> Worker:
    worker = Worker(config, memory=RankMemory(file, config, 0))
    worker.init_device()
    worker.load_model()
    return worker


def one_row() -> AttentionMetadata:
    zero, length = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    return AttentionMetadata(zero, zero, zero.view(1, 1), length, zero, 1)
