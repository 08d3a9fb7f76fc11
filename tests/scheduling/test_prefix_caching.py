"""Blocks that are found again by content: the answers are the same, with less work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.patches import on_call
from support.small_llamas import MakeEngine, run

from tpengine.inputs import Owner
from tpengine.sampling_params import SamplingParams
from tpengine.scheduling import block_pool
from tpengine.scheduling.block_manager import AllocStatus, BlockManager
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus

from .loop import Limits, Loop, make_request

SHARED = [3 + (11 * place) % 250 for place in range(43)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def pool(num_blocks: int = 10) -> BlockManager:
    return BlockManager(num_blocks, 4, watermark=0.0, enable_prefix_caching=True)


def compute(blocks: BlockManager, request: Request) -> Sequence:
    """Allocates, and computes what the cache does not know."""
    blocks.allocate(request)
    (sequence,) = request.sequences
    sequence.num_computed_tokens = sequence.num_tokens
    blocks.mark_computed(sequence, sequence.num_computed_tokens)
    return sequence


def num_hit(blocks: BlockManager, request: Request) -> int:
    """Allocates; how many tokens the cache knows."""
    blocks.allocate(request)
    return request.sequences[0].num_computed_tokens


def test_what_precedes_a_block_counts() -> None:
    blocks = pool()
    compute(blocks, make_request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert num_hit(blocks, make_request(1, [0, 2, 3, 4, 5, 6, 7, 8, 9])) == 0


def test_only_requests_of_the_same_salt_find_each_other() -> None:
    blocks = pool()
    computed = []
    for index, salt in enumerate(("one", "two", "", "one")):
        request = make_request(index, [1, 2, 3, 4, 5])
        request.owner = Owner(cache_salt=salt)
        computed.append(num_hit(blocks, request))
        request.sequences[0].num_computed_tokens = 5
        blocks.mark_computed(request.sequences[0], request.sequences[0].num_computed_tokens)
    assert computed == [0, 0, 0, 4]


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    blocks = pool()
    compute(blocks, make_request(0, list(range(12))))
    assert num_hit(blocks, make_request(1, list(range(length)))) == cached


@pytest.mark.parametrize(("first", "cached"), [(10, 4), (20, 8)], ids=["old", "young"])
def test_least_recently_used_goes_first_and_ends_before_beginnings(first: int, cached: int) -> None:
    blocks = pool(5)
    old, young = (compute(blocks, make_request(i, [10 * i + k for k in range(8)])) for i in (1, 2))
    blocks.free(old)
    blocks.free(young)
    taken = compute(blocks, make_request(3, list(range(100, 108))))  # one blank block, one of old's
    assert blocks.device.num_evictions == 1
    again = make_request(4, list(range(first, first + 9)))
    assert num_hit(blocks, again) == cached
    blocks.check_invariants([taken, again.sequences[0]])


def test_hits_that_others_hold_need_no_room() -> None:
    blocks = pool(4)
    compute(blocks, make_request(0, list(range(12))))
    same, other = make_request(1, list(range(10))), make_request(2, list(range(50, 60)))
    assert blocks.can_allocate(same) is AllocStatus.OK  # two of its three are there
    assert blocks.can_allocate(other) is AllocStatus.LATER
    blocks.allocate(same)
    assert blocks.num_free_blocks == 0


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = on_call(monkeypatch, block_pool, "digest_of")
    blocks = pool(20)
    request = make_request(0, list(range(21)))
    for _ in range(3):
        blocks.can_allocate(request)
    sequence = compute(blocks, request)
    for token in range(20):
        sequence.token_ids.append(token)
        blocks.append(sequence)
        sequence.num_computed_tokens += 1
        blocks.mark_computed(sequence, sequence.num_computed_tokens)
    assert len(calls) == 41 // 4


def test_collisions_keep_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest of a few bits wrong blocks are found; none is lost or freed twice."""

    monkeypatch.setattr(block_pool, "digest_of", lambda _, token_ids: bytes([sum(token_ids) % 3]))
    blocks = pool(12)
    held: list[Sequence] = []
    for index in range(60):
        request = make_request(index, [index % 7 + k for k in range(3 + index % 9)])
        while blocks.can_allocate(request) is not AllocStatus.OK:
            blocks.free(held.pop(0))
        held.append(compute(blocks, request))
        blocks.check_invariants(held)
    for sequence in held:
        blocks.free(sequence)
    assert blocks.num_free_blocks == 12


def test_a_conversation_finds_its_own_output(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = run(engine, [("first", SHARED, GREEDY)])["first"]
    longer = [*SHARED, *first.outputs[0].token_ids, 9, 8, 7]
    second = run(engine, [("second", longer, GREEDY)])["second"]
    assert second.num_cached_tokens == 48  # of 43 + 10, whole blocks whose K and V were computed
    wanted = run(make_engine(enable_prefix_caching=False), [("second", longer, GREEDY)])["second"]
    assert second.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_prompt_logprobs_take_no_hit() -> None:
    blocks = pool()
    compute(blocks, make_request(0, list(range(10))))
    asking = make_request(1, list(range(10)), replace(GREEDY, prompt_logprobs=1))
    assert num_hit(blocks, asking) == 0
    assert asking.sequences[0].status is SequenceStatus.WAITING


@pytest.mark.parametrize("block_size", [1, 2])
def test_beams_that_take_another_place_are_not_mistaken(block_size: int) -> None:
    """A sequence that goes on as a copy of another has that one's tokens, and not yet its blocks.
    The worker looks at what it finds for every prompt that continues a beam."""
    beams = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=12, ignore_eos=True)
    hits = 0
    for family in range(6):
        loop = Loop(Limits(block_size=block_size, num_blocks=300, caching=True))
        prompt = [3 + 50 * family + place for place in range(5)]
        loop.add(make_request(0, prompt, beams))
        loop.run()
        for index, completion in enumerate(loop.outputs["r0"].outputs, start=1):
            longer = [*prompt, *completion.token_ids]
            loop.add(make_request(index, longer, replace(GREEDY, max_tokens=2)))
        loop.run()
        hits += sum(output.num_cached_tokens for output in loop.outputs.values())
    assert hits > 6 * 3 * 10
