"""The block manager: its methods, their answers, and the mistakes that they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpengine.errors import CacheSizeError, EngineError
from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.sequence import Request, Sequence

from .loop import make_request


def only(request: Request) -> Sequence:
    (sequence,) = request.sequences
    return sequence


def allocated(num_blocks: int, num_tokens: int) -> tuple[BlockManager, Request, Sequence]:
    """A pool of blocks of four tokens, and a request that holds some of them."""
    blocks, request = BlockManager(num_blocks, 4), make_request(0, num_tokens)
    blocks.allocate(request)
    return blocks, request, only(request)


def test_ok_later_never() -> None:
    blocks = BlockManager(10, 4, watermark=0.2)
    assert blocks.can_allocate(make_request(0, 41)) is AllocStatus.NEVER
    assert blocks.can_allocate(make_request(0, 40)) is AllocStatus.OK  # alone: no watermark
    assert blocks.num_free_blocks == 10, "to ask takes nothing"
    blocks.check_invariants([])
    blocks.allocate(make_request(1, 4))
    assert blocks.can_allocate(make_request(0, 41)) is AllocStatus.NEVER
    assert blocks.can_allocate(make_request(0, 29)) is AllocStatus.LATER  # 8 of 9, 2 stay free
    assert blocks.can_allocate(make_request(0, 28)) is AllocStatus.OK  # 7 of 9
    assert BlockManager(10, 4, watermark=0.0).can_allocate(make_request(0, 40)) is AllocStatus.OK


def test_freeing_twice_is_refused() -> None:
    blocks, _, sequence = allocated(4, 4)
    blocks.free(sequence)
    with pytest.raises(EngineError, match="holds no blocks"):
        blocks.free(sequence)
    assert blocks.num_free_blocks == 4
    with pytest.raises(EngineError, match="holds no blocks"):
        blocks.append(sequence)


def test_allocating_twice_or_too_much_is_refused() -> None:
    blocks, request, sequence = allocated(4, 4)
    with pytest.raises(EngineError, match="already"):
        blocks.allocate(request)
    with pytest.raises(EngineError, match="4 blocks are wanted and 3 of 4 are free"):
        blocks.allocate(make_request(1, 16))
    blocks.check_invariants([sequence])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(CacheSizeError, match="at least 1"):
        BlockManager(num_blocks, block_size)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda _, sequences, __: sequences.pop(), "tables are held"),
        (lambda _, sequences, __: setattr(sequences[0], "num_computed_tokens", 9), "covers"),
        (lambda blocks, _, __: blocks.device.share(0), "reference counts"),
        (lambda _, __, blank: blank.append(blank[0]), "free twice"),
        (lambda _, __, blank: blank.append(0), "both free and held"),
        (lambda _, __, blank: blank.pop(), "add up"),
    ],
)
def test_invariants_see_damage(damage: Callable[..., None], words: str) -> None:
    """Blocks 0 to 3 are held."""
    blocks = BlockManager(8, 4)
    requests = [make_request(index, 8) for index in range(2)]
    assert [blocks.allocate(request) for request in requests] == [[0, 1], [2, 3]]
    sequences = [only(request) for request in requests]
    blocks.check_invariants(sequences)
    damage(blocks, sequences, blocks.device._blank)
    with pytest.raises(EngineError, match=words):
        blocks.check_invariants(sequences)
