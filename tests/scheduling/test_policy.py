"""Priority, its bound on starvation, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.small_llamas import MakeEngine, run

from tpengine.config import MAX_PRIORITY
from tpengine.errors import InvalidPriorityError
from tpengine.scheduling.policy import Priority

from .loop import Limits, Loop, make_request, plain

SHORT = plain(2)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("priority", ["r3", "r1", "r2", "r0", "r4"]), ("fcfs", ["r0", "r1", "r2", "r3", "r4"])],
)
def test_order_of_admission(policy: str, order: list[str]) -> None:
    """Lower priority first, and arrival among equals; or arrival alone."""
    loop = Loop(Limits(seqs=1, policy=policy))
    for index, priority in enumerate([1, 0, 0, -1, 1]):
        loop.add(make_request(index, 4, SHORT, priority))
    loop.run()
    assert [request.request_id for request in loop.admitted] == order


@pytest.mark.parametrize(("stride", "difference"), [(3, 1), (3, 4), (10, 2)])
def test_starvation_is_bounded(stride: int, difference: int) -> None:
    """More urgent requests arrive for ever; the other waits for `stride * difference` of them."""
    policy = Priority(stride)
    policy.add(make_request(0, [1], SHORT, difference))
    overtaken = 0
    for index in range(1, 1000):
        policy.add(make_request(index, [1], SHORT, 0))
        head = policy.head()
        policy.remove(head)
        if head.request_id == "r0":
            break
        overtaken += 1
    assert overtaken == stride * difference - 1
    assert overtaken < 999


def test_the_least_urgent_is_preempted() -> None:
    loop = Loop(Limits(num_blocks=6, policy="priority"))
    requests = [
        loop.add(make_request(index, 8, plain(12), priority))
        for index, priority in enumerate([1, 0, 0])
    ]
    loop.step()
    assert loop.step().preempted == [requests[0]]
    loop.run()


def test_many_waiting_are_kept_in_order() -> None:
    policy = Priority(5)
    requests = [make_request(i, [1], SHORT, (i * 7) % 5) for i in range(200)]
    for request in requests:
        policy.add(request)
    for request in requests[::3]:
        policy.remove(request)
    ranks = [policy.rank(request) for request in policy]
    assert ranks == sorted(ranks)
    assert len(policy) == len(ranks) == 200 - 67


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 0.5, True, "high"])
def test_priorities_out_of_range(make_engine: MakeEngine, priority: Any) -> None:
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    with pytest.raises(InvalidPriorityError, match=r"\[-1000, 1000\]"):
        engine.add_request("r", None, SHORT, prompt_token_ids=[5], priority=priority)
    run(engine, [("r", [5], SHORT)])
    with pytest.raises(InvalidPriorityError, match="scheduling_policy='priority'"):
        make_engine().add_request("r", None, SHORT, prompt_token_ids=[5], priority=1)
