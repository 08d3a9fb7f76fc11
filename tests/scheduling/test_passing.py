"""Requests that pass a waiting one which has no room, and the step by which this one starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.inputs import Owner
from tpengine.scheduling.sequence import Request

from .loop import Limits, Loop, make_request, plain


def add(loop: Loop, index: int, n: int = 1, max_tokens: int = 4, prompt: int = 5) -> Request:
    return loop.add(make_request(index, prompt, plain(max_tokens, n=n)))


def test_a_small_request_does_not_wait_behind_one_that_needs_more_slots() -> None:
    loop = Loop(Limits(tokens=64, seqs=8))
    add(loop, 0, n=5, max_tokens=9)
    loop.step()
    add(loop, 1, n=4)
    small = add(loop, 2, max_tokens=2)
    loop.step()
    loop.step()
    assert loop.endings == {small.request_id: "length"}
    loop.run()


def test_a_small_request_does_not_wait_behind_one_that_needs_more_blocks() -> None:
    loop = Loop(Limits(num_blocks=10))
    loop.add_plain(20, 24, 4, max_tokens=2)
    assert [row.seq_id // 100 for row in loop.step().rows] == [0, 2]
    loop.run()


def test_what_is_as_large_waits_its_turn() -> None:
    """The first may be passed for as many steps as it may run itself, and no longer."""
    loop = Loop(Limits(tokens=64, seqs=8))
    add(loop, 0, n=5, max_tokens=9)
    loop.step()
    add(loop, 1, n=4, max_tokens=4)  # 8 steps until there is room, and 4 steps of its own
    add(loop, 2, n=2, max_tokens=13)
    add(loop, 3, n=2, max_tokens=12)
    loop.step()
    assert [request.arrival_index for request in loop.admitted] == [0, 3]
    loop.run()
    assert [request.arrival_index for request in loop.admitted] == [0, 3, 1, 2]


def test_the_first_is_passed_for_less_time_when_what_it_waits_for_ends_early() -> None:
    loop = Loop(Limits(tokens=64, seqs=8))
    long = add(loop, 0, n=5, max_tokens=100)
    loop.step()
    first = add(loop, 1, n=8, max_tokens=6)
    add(loop, 2, max_tokens=3)
    loop.step()
    loop.end(long)
    ended_at = loop.worker.last_step
    for index in range(3, 30):
        add(loop, index, max_tokens=3)
        loop.step()
        if first in loop.admitted:
            break
    assert loop.worker.last_step <= ended_at + 1 + 6
    assert len(loop.admitted) > 4
    loop.run()


@pytest.mark.parametrize("kind", ["slots", "adapters"])
def test_the_first_starts_although_others_never_stop_coming(kind: str) -> None:
    loop = Loop(Limits(tokens=64, seqs=4, num_blocks=200, max_loras=1 if kind == "adapters" else 0))
    params = plain(6)
    adapters = (1, 2) if kind == "adapters" else (0, 0)
    loop.add(make_request(0, 5, params, adapter=adapters[0]))
    first = loop.add(make_request(1, 5, plain(6, n=1 if adapters[0] else 4), adapter=adapters[1]))
    index = 2
    while first not in loop.admitted:
        loop.add(make_request(index, 5, params, adapter=adapters[0]))
        loop.step()
        index += 1
        assert loop.worker.last_step <= 1 + 6 + 6
    assert len(loop.admitted) > 2
    loop.run()


def test_a_request_that_passed_and_is_preempted_waits_behind_what_it_passed() -> None:
    loop = Loop(Limits(num_blocks=10, mode="recompute"))
    loop.add_plain(20, 28, 8, max_tokens=14)
    while not loop.preemptions["r2"]:
        loop.step()
    assert [request.arrival_index for request in loop.policy] == [1, 2]
    loop.run()


def test_with_another_first_others_may_pass() -> None:
    """With fair shares the first changes without an arrival, when its owner was given more."""
    loop = Loop(Limits(tokens=64, seqs=4, num_blocks=400, fairness="owner"))
    a, b = Owner(account="a"), Owner(account="b")
    long = loop.add(make_request(0, 4, plain(100), owner=a))
    loop.add(make_request(1, 40, plain(1), owner=b))
    loop.step()
    loop.add(make_request(2, 4, plain(2, n=4), owner=a))  # the first: 100 steps, and 2 of its own
    late = loop.add(make_request(3, 4, plain(250), owner=a))
    loop.add(make_request(4, 4, plain(200, n=4), owner=b))  # then this one: 80 steps, and 200
    for _ in range(15):
        loop.step()
    assert late not in loop.admitted
    for _ in range(6):
        loop.step()
    assert late in loop.admitted
    assert not long.finished
    loop.run()


def num_left(request: Request) -> int:
    max_tokens = request.sampling_params.max_tokens
    return max_tokens - request.sequences[0].num_output_tokens


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(1, 12)), min_size=3, max_size=16
    )
)
def test_the_first_starts_within_its_bound(arrivals: list[tuple[int, int, int]]) -> None:
    """(steps after the arrival before, sequences, tokens of each); blocks are plenty."""
    loop = Loop(Limits(tokens=200, seqs=8, num_blocks=2000))
    bounds: dict[str, int] = {}
    due = 0
    queue = []
    for index, (pause, n, max_tokens) in enumerate(arrivals):
        due += pause
        queue.append((due, index, n, max_tokens))
    step = 0
    while queue or loop.scheduler.has_unfinished_requests():
        while queue and queue[0][0] <= step:
            _, index, n, max_tokens = queue.pop(0)
            add(loop, index, n, max_tokens)
        loop.step()
        step += 1
        for request in loop.admitted:
            assert step <= bounds.get(request.request_id, step)
            bounds.pop(request.request_id, None)
        first = next(iter(loop.policy), None)
        if first is not None and first.request_id not in bounds:
            unfinished = loop.scheduler.unfinished_requests()
            older = [r for r in unfinished if r.arrival_index < first.arrival_index]
            until_room = max(map(num_left, older), default=0)
            bounds[first.request_id] = step + until_room + num_left(first) + 1


@pytest.mark.parametrize(
    ("limits", "prompt"),
    [
        ({"model_len": 64}, 70),
        ({"chunked": False}, 65),
        ({"num_blocks": 30}, 121),
    ],
    ids=str,
)
def test_what_can_never_run_does_not_pass(limits: dict[str, Any], prompt: int) -> None:
    """It ends alone, as at the head of the queue, and those before and behind it go on."""
    loop = Loop(Limits(**{"seqs": 3, "num_blocks": 200, **limits}))
    add(loop, 0, n=2, max_tokens=9)
    loop.step()
    add(loop, 1, n=2)
    hopeless = add(loop, 2, prompt=prompt, max_tokens=2)
    behind = add(loop, 3, max_tokens=2)
    for _ in range(4):
        loop.step()
    assert loop.endings[behind.request_id] == "length"
    loop.run()
    assert hopeless not in loop.admitted
    assert str(prompt) in str(hopeless.error)
    assert set(loop.endings.values()) == {"length"}
