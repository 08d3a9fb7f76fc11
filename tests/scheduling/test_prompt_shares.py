"""A short prompt beside a long one: how long it waits, and what the long one loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patches import on_call

from tpengine.inputs import Owner
from tpengine.scheduling.passing import Passing

from .fake_worker import FakeWorker
from .loop import Limits, Loop, make_request, plain, sizes

LIMITS = Limits(tokens=64, num_blocks=520)
LONG = 600


def parts(loop: Loop) -> dict[int, int]:
    """Tokens of each request in the next step, by its number."""
    output = loop.step()
    rows = zip(output.rows, sizes(output), strict=True)
    return {sequence.seq_id // 100: size for sequence, size in rows}


@pytest.mark.parametrize(
    ("limits", "short"),
    [
        ({"caching": True, "max_loras": 1}, {"adapter": 1}),
        ({"window": 16, "policy": "priority"}, {"priority": -1}),
        ({"fairness": "owner"}, {"params": plain(3, n=3)}),
        ({"num_blocks": 200}, {"params": plain(2)}),
    ],
    ids=str,
)
def test_a_short_prompt_begins_in_the_next_step(
    limits: dict[str, Any], short: dict[str, Any]
) -> None:
    """Also behind long ones that wait; with 200 blocks these find none, and it passes."""
    loop = Loop(replace(LIMITS, **limits))
    loop.add_plain(LONG, LONG, 400)
    for _ in range(3):
        loop.step()
    request = loop.add(make_request(9, 5, **{"params": plain(3), **short}))
    output = loop.step()
    assert request.sequences[0] in output.sampled
    assert sum(sizes(output)) == 64
    assert parts(loop)[0] >= 64 // 2 - 3, "the decodes of the short one come first"
    loop.run()


def test_a_prompt_that_is_nearly_all_in_the_prefix_cache_is_short() -> None:
    loop = Loop(replace(LIMITS, caching=True))
    prompt = [7 * place % 900 for place in range(LONG)]
    loop.add(make_request(0, prompt, plain(1)))
    loop.run()
    loop.add_plain(LONG, LONG, first=1)
    loop.step()
    loop.add(make_request(3, prompt, plain(1)))
    assert parts(loop) == {1: 60, 3: 4}
    loop.run()


def test_what_the_prefix_cache_will_know_is_computed_once() -> None:
    """Prompts with one long beginning come together; the shorter ones wait for it."""
    loop = Loop(replace(LIMITS, caching=True))
    common = [7 * place % 900 for place in range(300)]
    for index, size in enumerate([200, 20, 10, 5, 8]):
        loop.add(make_request(index, common + [index + 900] * size, plain(1)))
    computed = 0
    while loop.scheduler.has_unfinished_requests():
        computed += sum(parts(loop).values())
    assert computed <= 300 + 243 + 4 * 4, "a part of a block for each"


def test_a_long_prompt_needs_at_most_twice_its_steps() -> None:
    """However many short ones come meanwhile; and the steps are full."""
    loop = Loop(LIMITS)
    (long,) = loop.add_plain(640, max_tokens=1)
    steps, index = 0, 1
    while not long.finished:
        loop.add_plain(20, 20, 20, first=index, max_tokens=1)
        assert sum(parts(loop).values()) == 64
        steps, index = steps + 1, index + 3
    assert 10 < steps <= 2 * 10
    loop.run()
    assert len(loop.endings) == index


@pytest.mark.parametrize("prompts", [[400] * 5, [300, 500, 200, 640, 100, 90], [700, 3, 3, 3]])
def test_a_batch_needs_no_more_steps(prompts: list[int]) -> None:
    loop = Loop(LIMITS)
    loop.add_plain(*prompts, max_tokens=1)
    used = []
    while loop.scheduler.has_unfinished_requests():
        used.append(len(parts(loop)))
    assert len(used) == -(-sum(prompts) // 64)
    assert max(used) == 2 or len(set(prompts)) > 1, "equal prompts come one after another"


@pytest.mark.parametrize(
    ("limits", "short", "begins"),
    [
        ({"seqs": 3}, {}, False),
        ({"seqs": 4}, {}, True),
        ({"policy": "priority"}, {"priority": 1}, False),
        ({"policy": "priority"}, {"priority": 0}, True),
        ({"num_blocks": 305}, {}, False),
    ],
    ids=str,
)
def test_a_short_prompt_takes_nothing_from_those_before_it(
    limits: dict[str, Any], short: dict[str, Any], begins: bool
) -> None:
    """Neither the room of the first that waits, nor tokens of one of a higher priority."""
    loop = Loop(replace(LIMITS, **limits))
    loop.add_plain(LONG)
    loop.add(make_request(1, LONG, plain(4, n=2)))
    loop.step()
    loop.add(make_request(2, 20, plain(100), **short))
    assert (2 in parts(loop)) == begins
    loop.run()


def test_owners_have_their_turn_by_their_counters() -> None:
    """An owner that was given more gets no part of another's steps, and its own prompts share."""
    loop = Loop(replace(LIMITS, fairness="owner"))
    ahead, behind = Owner(account="ahead", weight=0.01), Owner(account="behind")
    loop.add(make_request(0, 8, plain(200), owner=ahead))
    loop.step()
    loop.add(make_request(1, LONG, plain(1), owner=behind))
    for _ in range(4):
        loop.step()
    loop.add(make_request(2, 5, plain(1), owner=ahead))
    loop.add(make_request(3, 5, plain(1), owner=behind))
    assert parts(loop).keys() == {0, 1, 3}
    loop.run()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 4)), max_size=8))
def test_steps_are_full_and_the_first_prompt_has_its_half(
    arrivals: list[tuple[int, int, int]],
) -> None:
    """(steps after the arrival before, prompt tokens, tokens to generate); blocks are plenty."""
    loop = Loop(Limits(tokens=32, seqs=64, num_blocks=220))
    for index, (pause, prompt, max_tokens) in enumerate([*arrivals, (30, 1, 1)]):
        for _ in range(pause):
            requests = loop.scheduler.unfinished_requests()
            behind = {r.arrival_index: r.sequences[0].num_behind for r in requests}
            used = parts(loop)
            assert sum(used.values()) == min(32, sum(behind.values()))
            first = min((number for number, left in behind.items() if left > 1), default=None)
            if first is not None:
                num_decodes = list(behind.values()).count(1)
                assert used[first] >= min(behind[first], -(-(32 - num_decodes) // 2))
        loop.add(make_request(index, prompt, plain(max_tokens)))
    loop.run()


def test_a_step_asks_once_how_long_the_first_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait behind it that run too long to pass it: the answer takes a look at all
    running requests."""
    asked = on_call(monkeypatch, Passing, "_steps_until_room")
    loop = Loop(LIMITS)
    loop.add_plain(LONG, LONG * 3)
    for index in range(2, 30):
        loop.add(make_request(index, 5, plain(800)))
    loop.step()
    loop.step()
    asked.clear()
    loop.step()
    assert loop.scheduler.num_waiting == 29
    assert len(asked) == 1


def test_a_prompt_that_waits_for_a_picture_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "_computed_pictures", lambda *_: {})
    loop = Loop(replace(LIMITS, picture_rows=10))
    loop.add_plain(LONG)
    loop.add(make_request(1, 20, plain(3), pictures="a"))
    assert parts(loop) == {0: 63, 1: 1}
    for _ in range(3):
        assert parts(loop) == {0: 64}
