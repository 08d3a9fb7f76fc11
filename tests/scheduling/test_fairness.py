"""Shares of owners: who starts first, who gives room, and what is charged."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.inputs import Owner
from tpengine.scheduling.fairness import OUTPUT_COST, PROMPT_COST, FairShares, OwnerStats
from tpengine.sequence import Request

from .loop import Limits, Loop, make_request, plain

FLOOD, OTHER, HEAVY = Owner("a", "a"), Owner("b", "b"), Owner("c", "c", weight=3.0)


def add(loop: Loop, index: int, owner: Owner, prompt: int = 40, max_tokens: int = 8) -> Request:
    return loop.add(make_request(index, prompt, plain(max_tokens), owner=owner))


def stats(loop: Loop) -> dict[str, OwnerStats]:
    assert isinstance(loop.policy, FairShares)
    return loop.policy.stats()


def started_at(loop: Loop, request: Request) -> int:
    """Steps until a request starts."""
    first = loop.worker.last_step
    while request not in loop.admitted:
        loop.step()
    return loop.worker.last_step - first


def test_a_flood_does_not_keep_another_owner_waiting() -> None:
    waits = {}
    for fairness in ("owner", "none"):
        loop = Loop(Limits(tokens=32, seqs=4, num_blocks=200, fairness=fairness))
        for index in range(30):
            add(loop, index, FLOOD)
        for _ in range(9):
            loop.step()
        waits[fairness] = started_at(loop, add(loop, 50, OTHER))
        loop.run()
    assert waits["owner"] == 1
    assert waits["none"] > 20


def test_a_prompt_in_parts_makes_way_for_another_owner() -> None:
    """The whole step belongs to the first prompt until the other owner comes; a stream goes on."""
    loop = Loop(Limits(tokens=16, num_blocks=200, fairness="owner"))
    stream = add(loop, 0, HEAVY, 4, 30)
    loop.step()
    long = add(loop, 1, FLOOD, 160)
    loop.step()
    loop.step()
    short = add(loop, 2, OTHER, 20)
    rows = [dict(zip(o.rows, o.step_input.num_scheduled_tokens, strict=True)) for o in
            (loop.step(), loop.step())]  # fmt: skip
    assert [step[stream.sequences[0]] for step in rows] == [1, 1]
    assert sum(step.get(short.sequences[0], 0) for step in rows) == 20
    assert 0 < sum(step.get(long.sequences[0], 0) for step in rows) == 30 - 20
    loop.run()


def test_room_is_taken_from_the_owner_that_holds_too_much() -> None:
    """No more than what is due, and from no owner within its share."""
    loop = Loop(Limits(tokens=100, seqs=4, num_blocks=200, fairness="owner"))
    for index in range(9):
        add(loop, index, FLOOD, 8, 60)
    loop.step()
    first, second, third = (add(loop, index, OTHER, 4, 60) for index in (20, 21, 22))
    preempted = [one.request_id for _ in range(20) for one in loop.step().preempted]
    assert preempted == ["r3", "r2"]
    assert {first, second} < set(loop.admitted)
    assert third not in loop.admitted
    started = started_at(loop, add(loop, 30, HEAVY, 4, 4))
    assert started == 1, "its share is 3 of 5: at least one of four slots"
    loop.run()


def test_the_greatest_counter_is_preempted_first() -> None:
    loop = Loop(Limits(num_blocks=12, fairness="owner"))
    greedy = [add(loop, index, FLOOD, 12, 12) for index in (0, 1)]
    add(loop, 2, HEAVY, 12, 12)
    victims = []
    while loop.scheduler.has_unfinished_requests():
        victims += loop.step().preempted
    assert victims[0] is greedy[1]


def test_idle_time_gives_no_credit_and_costs_nothing() -> None:
    loop = Loop(Limits(tokens=16, seqs=1, num_blocks=200, fairness="owner"))
    add(loop, 0, OTHER, 8, 2)
    for index in range(1, 9):
        add(loop, index, FLOOD, 8, 2)
    for index in range(20, 28):
        add(loop, index, HEAVY, 8, 2)
    for _ in range(20):
        loop.step()
    late = [add(loop, index, OTHER, 8, 2) for index in range(40, 48)]
    loop.run()
    order = [request.owner.account for request in loop.admitted]
    since = order[order.index("b", 1) :]
    assert since[:6].count("b") <= 3, "it does not catch up on what it did not use"
    assert late[-1].finished


def test_tokens_are_charged_once() -> None:
    """Not again after a preemption, a lost step or a lost worker."""
    loop = Loop(Limits(tokens=16, num_blocks=14, mode="recompute", fairness="owner"))
    requests = [
        add(loop, index, owner, 10 + index, 12)
        for index, owner in enumerate((FLOOD, OTHER, FLOOD, HEAVY, OTHER))
    ]
    for number in range(200):
        loop.step(lost_to=14 if number in (3, 9) else None)
        if number == 15:
            loop.lose(14)
    loop.run()
    assert sum(loop.preemptions.values()) > 0
    assert loop.events["losses"] == 3
    for account, found in stats(loop).items():
        own = [one for one in requests if one.owner.account == account]
        assert found == OwnerStats(0, 0, sum(len(one.prompt_token_ids) + 12 for one in own))


def test_owners_are_forgotten_and_labels_are_few() -> None:
    loop = Loop(Limits(tokens=64, num_blocks=200, fairness="owner"))
    for index in range(1300):
        add(loop, index, Owner(account=f"address {index}"), 2, 1)
        loop.step()
    loop.run()
    assert len(stats(loop)) == 65
    assert sum(one.num_tokens for one in stats(loop).values()) == 3900
    assert isinstance(loop.policy, FairShares)
    assert len(loop.policy._idle) <= 1024


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=2, max_size=8),
    weights=st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([1.0, 2.0])),
    limits=st.builds(
        Limits,
        tokens=st.integers(8, 64),
        seqs=st.integers(1, 8),
        num_blocks=st.integers(20, 60),
        num_host_blocks=st.sampled_from([0, 30]),
        mode=st.sampled_from(["swap", "recompute"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        fairness=st.just("owner"),
    ),
)
def test_busy_owners_get_their_shares(
    sizes: list[tuple[int, int]], weights: tuple[float, float], limits: Limits
) -> None:
    """Two owners that always wait get tokens by their weights, within about a cache of tokens."""
    loop = Loop(limits)
    owners = [Owner(name, name, weight) for name, weight in zip("ab", weights, strict=True)]
    requests: dict[str, list[Request]] = {"a": [], "b": []}
    index = 0
    cache = limits.num_blocks * limits.block_size
    bound = OUTPUT_COST * 2 * (cache + limits.tokens) / min(weights)
    for step in range(150):
        for owner in owners:
            while sum(r not in loop.admitted for r in requests[owner.account][-3:]) < 3:
                prompt, max_tokens = sizes[
                    (index // 2 if owner.name == "a" else index) % len(sizes)
                ]
                requests[owner.account].append(add(loop, index, owner, prompt, max_tokens))
                index += 1
        loop.step()
        if step % 50 == 49:
            a, b = (_cost(requests[one.account]) / one.weight for one in owners)
            assert abs(a - b) <= bound
    assert all(any(one.finished for one in given) for given in requests.values())


def _cost(requests: list[Request]) -> float:
    prompts = sum(
        r.sequences[0].num_prompt_tokens for r in requests if r.sequences[0].num_output_tokens
    )
    outputs = sum(r.sequences[0].num_output_tokens for r in requests)
    return PROMPT_COST * prompts + OUTPUT_COST * outputs
