"""Swapped requests: which are swapped out, and when they come back."""

from __future__ import annotations

import pytest

from tpengine.scheduling.sequence import Request

from .loop import Limits, Loop, make_request, plain, run_alone, statuses

LONG = plain(16, n=2)


def add_pairs(loop: Loop, count: int, num_prompt_tokens: int = 8) -> list[Request]:
    return [loop.add(make_request(index, num_prompt_tokens, LONG)) for index in range(count)]


def step_until(loop: Loop, event: str) -> None:
    for _ in range(100):
        if loop.events[event]:
            return
        loop.step()
    raise AssertionError(f"no {event}")


def test_swapped_requests_come_back_before_waiting_ones() -> None:
    loop = Loop(Limits(seqs=4, num_blocks=12, num_host_blocks=20))
    requests = add_pairs(loop, 3)
    step_until(loop, "swap outs")
    assert statuses(*requests) == ["RUNNING"] * 2 + ["SWAPPED"] * 2 + ["WAITING"] * 2
    second = requests[1]
    assert all(s.slot is None and s.num_computed_tokens for s in second.sequences)
    while loop.scheduler.num_swapped:
        assert loop.scheduler.num_waiting == 1
        loop.step()
    assert all(s.slot is not None for s in second.sequences)
    loop.run()
    assert loop.events["swap ins"] >= loop.events["swap outs"] > 0


def test_shared_blocks_are_swapped_once_and_stay_shared() -> None:
    loop = Loop(Limits(seqs=4, num_blocks=14, num_host_blocks=20))
    _, request = add_pairs(loop, 2, num_prompt_tokens=12)
    step_until(loop, "swap outs")
    # Three blocks of the prompt, and two of each sequence's own.
    assert loop.events["swap outs"] == 3 + 2 * 2
    assert loop.blocks.host.num_free == 20 - 7
    step_until(loop, "swap ins")
    first, other = (loop.blocks.block_ids(sequence) for sequence in request.sequences)
    assert first[:3] == other[:3]
    loop.run()


def test_without_room_on_the_host_it_is_recomputed() -> None:
    loop = Loop(Limits(seqs=4, num_blocks=12, num_host_blocks=2, mode="swap"))
    add_pairs(loop, 2)
    loop.run()
    assert loop.events["group recomputed"] > 0
    assert loop.events["swap outs"] == 0
    assert all(o.error is None for o in loop.outputs.values())


@pytest.mark.parametrize(
    ("mode", "group", "single"),
    [
        ("auto", "swapped", "recomputed"),
        ("swap", "swapped", "swapped"),
        ("recompute", "recomputed", "recomputed"),
    ],
)
def test_modes(mode: str, group: str, single: str) -> None:
    loop = Loop(Limits(num_blocks=14, num_host_blocks=40, mode=mode))
    for index in range(6):
        loop.add(make_request(index, 9, plain(20, n=1 + index % 2)))
    loop.run()
    happened = {event for event in loop.events if event.startswith(("group ", "single "))}
    assert happened == {f"group {group}", f"single {single}"}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_no_preemption_for_a_group_that_outgrows_the_cache(mode: str, chunked: bool) -> None:
    """Two shared blocks, and four for each of its four sequences, are more than 16. The neighbour
    stays where it is: the step in which the group ends has its row, so it is sent."""
    loop = Loop(Limits(num_blocks=16, num_host_blocks=40, mode=mode, chunked=chunked))
    group = loop.add(make_request(0, 8, plain(40, n=4)))
    for _ in range(8):
        loop.step()
    assert statuses(group) == ["RUNNING"] * 4
    (neighbour,) = loop.add_plain(3, first=1, max_tokens=12)
    while not group.finished:
        output = loop.step()
    assert output.ignored == [group]
    assert output.rows == neighbour.sequences
    loop.run()
    assert neighbour.metrics.num_preemptions == 0
    error = loop.outputs["r0"].error
    assert "need 18 blocks of 4, but the KV cache has 16" in error
    assert loop.outputs["r1"].outputs[0].token_ids == run_alone(neighbour).outputs[0].token_ids
