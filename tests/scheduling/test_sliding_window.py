"""Sliding windows: what no later token sees is given back while a sequence runs."""

from __future__ import annotations

import pytest

from tpengine.scheduling.block_manager import NO_BLOCK, BlockManager
from tpengine.scheduling.sequence import Request, Sequence

from .fake_worker import generate_undisturbed
from .loop import Limits, Loop, make_request, plain


def num_held(loop: Loop, sequence: Sequence) -> int:
    return sum(block != NO_BLOCK for block in loop.blocks.block_ids(sequence))


def run_and_count(loop: Loop, request: Request) -> list[int]:
    """Blocks that the request's first sequence holds while each of its steps is computed."""
    counts: list[int] = []
    while not request.finished:
        loop.step(lambda: counts.append(num_held(loop, request.sequences[0])))
    return counts


@pytest.mark.parametrize(
    ("window", "block_size", "most"),
    [(40, 16, 4), (34, 16, 4), (33, 16, 3), (16, 16, 2), (5, 16, 2), (1, 8, 2), (None, 16, 22)],
)
def test_a_decode_holds_its_window(window: int | None, block_size: int, most: int) -> None:
    """(window - 1) / block_size, rounded up, and one. In the end there are 350 tokens."""
    loop = Loop(Limits(window=window, block_size=block_size))
    request = loop.add(make_request(0, 3, plain(347)))
    assert max(run_and_count(loop, request)) == most
    alone = generate_undisturbed(request.prompt_token_ids, request.seed, 347)
    assert request.sequences[0].output_token_ids == alone


def test_one_long_prompt_in_the_smallest_cache() -> None:
    """Three blocks of the window without its last token, one because it begins and ends within a
    block, and two of a chunk. The one is not needed while chunks end with their blocks."""
    loop = Loop(Limits(tokens=8, num_blocks=6, window=10))
    (request,) = loop.add_plain(300, max_tokens=30)
    assert max(run_and_count(loop, request)) == 5
    assert loop.endings == {"r0": "length"}
    small = Loop(Limits(tokens=8, num_blocks=5, window=10))
    (refused,) = small.add_plain(300)
    small.run()
    assert "need 6 blocks of 4, but the KV cache has 5" in str(refused.error)


def test_what_was_given_back_is_not_swapped() -> None:
    """Three that begin with a block each grow to three, and the last one is swapped out."""
    loop = Loop(Limits(num_blocks=10, num_host_blocks=3, window=9, mode="swap"))
    *_, last = requests = loop.add_plain(3, 3, 3, 20, max_tokens=40)
    for _ in range(40):
        loop.step()
    assert loop.events["single swapped"] > 0
    assert last.sequences[0].num_computed_tokens > 20
    assert loop.events["given back"] > 0
    loop.run()
    assert loop.events["single recomputed"] == 0
    for request in requests:
        alone = generate_undisturbed(request.prompt_token_ids, request.seed, 40)
        assert request.sequences[0].output_token_ids == alone


@pytest.mark.parametrize(
    ("num_forgotten", "num_computed", "num_shared"), [(0, 20, 2), (1, 20, 2), (2, 12, 2), (3, 0, 0)]
)
def test_a_hit_needs_the_blocks_of_its_window_only(
    num_forgotten: int, num_computed: int, num_shared: int
) -> None:
    """Blocks 0, 3, 2 and 1 are given back in this order, and forgotten in this order. A token sees
    the seven before it."""
    blocks = BlockManager(10, 4, 0.0, enable_prefix_caching=True, num_kept_tokens=7)
    first, again = make_request(0, 24), make_request(0, 24)
    blocks.allocate(first)
    for num_tokens in (12, 24):
        first.sequences[0].num_computed_tokens = num_tokens
        blocks.mark_computed(first.sequences[0], first.sequences[0].num_computed_tokens)
    assert blocks.block_ids(first.sequences[0]).count(NO_BLOCK) == 4
    blocks.free(first.sequences[0])
    assert blocks.num_free_blocks == 10
    other = make_request(1, 4 * (4 + num_forgotten))
    blocks.allocate(other)
    blocks.free(other.sequences[0])
    assert blocks.device.num_evictions == num_forgotten
    blocks.allocate(again)
    assert again.sequences[0].num_computed_tokens == num_computed
    assert blocks.device.num_hits == num_shared
    blocks.check_invariants(again.sequences)
