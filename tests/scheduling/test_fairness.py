"""Shares of owners: who starts first, who gives room, and what is charged."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.costs import count_work

from tpengine.inputs import Owner
from tpengine.scheduling.fairness import OUTPUT_COST, PROMPT_COST, FairShares, OwnerStats
from tpengine.scheduling.sequence import Request

from .loop import Limits, Loop, make_request, plain

FLOOD, OTHER, HEAVY = Owner("a", "a"), Owner("b", "b"), Owner("c", "c", weight=3.0)


def add(loop: Loop, index: int, owner: Owner, prompt: int = 40, max_tokens: int = 8) -> Request:
    return loop.add(make_request(index, prompt, plain(max_tokens), owner=owner))


def stats(loop: Loop) -> dict[str, OwnerStats]:
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
    preempted = [request.request_id for _ in range(20) for request in loop.step().preempted]
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
    for index in range(1, 161):
        add(loop, index, FLOOD if index <= 40 else HEAVY, 8, 2)
    for _ in range(200):
        loop.step()
    while loop.admitted[-1].owner is not FLOOD:  # its counter rises by three requests of c
        loop.step()
    num_before = len(loop.admitted)
    for index in range(200, 240):
        add(loop, index, OTHER, 8, 2)
    loop.run()
    since = [request.owner.account for request in loop.admitted[num_before:]]
    assert "b" in since[:2], "its counter is the lowest"
    assert 3 <= since[:20].count("b") <= 5, "a fifth, by its weight: it does not catch up"


def test_tokens_are_charged_once() -> None:
    """Not again after a preemption, a lost step or a lost worker. Those of encoder prompts count,
    also before a prompt of a single token."""
    loop = Loop(Limits(tokens=16, num_blocks=14, mode="recompute", fairness="owner"))
    requests = [
        loop.add(make_request(index, size, plain(12), owner=owner, encoder=encoder))
        for index, (owner, size, encoder) in enumerate(
            [(FLOOD, 10, 0), (OTHER, 1, 9), (FLOOD, 12, 0), (HEAVY, 13, 0), (OTHER, 14, 9)]
        )
    ]
    for number in range(200):
        loop.step(lost_to=14 if number in (3, 9) else None)
        if number == 15:
            loop.lose(14)
    loop.run()
    assert sum(loop.preemptions.values()) > 0
    assert loop.events["losses"] == 3
    for account, counted in stats(loop).items():
        own = [r for r in requests if r.owner.account == account]
        assert counted == OwnerStats(0, 0, sum(r.num_prompt_tokens + 12 for r in own))


def test_owners_are_forgotten_and_labels_are_few() -> None:
    loop = Loop(Limits(tokens=64, num_blocks=200, fairness="owner"))
    for index in range(1300):
        add(loop, index, Owner(account=f"address {index}"), 2, 1)
        loop.step()
    loop.run()
    assert len(stats(loop)) == 65
    assert sum(owner.num_tokens for owner in stats(loop).values()) == 3900
    assert len(loop.policy._idle) <= 1024


def test_owners_of_odd_weights_leave_shares_as_they_were() -> None:
    """In floats 1.0 + 0.1 + 3.3 - 0.1 - 3.3 is over 1.0, and half of four slots is less than 2."""
    loop = Loop(Limits(tokens=64, seqs=4, num_blocks=200, fairness="owner"))
    for index in range(4):
        add(loop, index, FLOOD, 4, 100)
    loop.step()
    for index, weight in enumerate((0.1, 3.3), start=4):
        add(loop, index, Owner(f"{weight}", f"{weight}", weight), 4, 3 * index)
    for _ in range(40):
        loop.step()
    assert [request.owner for request in loop.scheduler._queues.running] == [FLOOD] * 4
    others = [add(loop, index, OTHER, 4, 20) for index in range(6, 9)]
    for _ in range(6):
        loop.step()
    assert [len(request.running_sequences) for request in others] == [1, 1, 0]


def test_room_is_taken_only_if_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waiting request that is given the room of others starts in that step. Blocks that
    requests share are not free when one of them is preempted, and one may start again at once."""
    limits = Limits(num_blocks=20, mode="swap", caching=True, fairness="owner")
    choose, chosen, num_chosen = FairShares.choose_victims, list[Request](), 0

    def note(shares: FairShares, first: Request, *more: Any) -> list[Request]:
        victims = choose(shares, first, *more)
        chosen.extend([first] if victims else [])
        return victims

    monkeypatch.setattr(FairShares, "choose_victims", note)
    rng = random.Random(1)
    for number in range(12):
        loop = Loop(replace(limits, num_host_blocks=40 * (number % 2)))
        requests = []
        for index in range(rng.randint(6, 10)):
            num_common, num_own = rng.choice([0, 16, 24]), rng.randint(1, 16)
            prompt = [*range(num_common), *(100 + index + at for at in range(num_own))]
            owner = OTHER if index >= 3 and rng.random() < 0.4 else FLOOD
            requests.append(make_request(index, prompt, plain(rng.randint(10, 40)), owner=owner))
        while requests or loop.scheduler.has_unfinished_requests():
            if requests and rng.random() < 0.4:
                loop.add(requests.pop(0))
            rows = loop.step().rows
            assert all(request.sequences[0] in rows for request in chosen)
            num_chosen += len(chosen)
            chosen.clear()
    assert num_chosen >= 5


@pytest.mark.parametrize("num_mixes", [2, pytest.param(12, marks=pytest.mark.soak)])
def test_busy_owners_get_their_shares(num_mixes: int) -> None:
    """Two owners that always wait get tokens by their weights, within about a cache of tokens;
    without fair shares they do not."""
    rng = random.Random(1)
    for _ in range(num_mixes):
        sizes = [(rng.randint(1, 60), rng.randint(1, 20)) for _ in range(rng.randint(2, 8))]
        weights = rng.choice([0.5, 1.0]), rng.choice([1.0, 2.0, 4.0])
        limits = Limits(
            tokens=rng.randint(8, 64),
            seqs=rng.randint(1, 8),
            num_blocks=rng.randint(20, 60),
            num_host_blocks=rng.choice([0, 30]),
            mode=rng.choice(["swap", "recompute"]),
            policy=rng.choice(["fcfs", "priority"]),
        )
        bound = OUTPUT_COST * (limits.num_blocks * limits.block_size + limits.tokens)
        assert _most_apart(sizes, weights, replace(limits, fairness="owner")) <= bound
        assert _most_apart(sizes, weights, limits) > bound


def _most_apart(
    sizes: list[tuple[int, int]], weights: tuple[float, float], limits: Limits
) -> float:
    """Greatest difference of two owners' tokens; the first sends three times as many requests."""
    loop = Loop(limits)
    owners = [Owner(name, name, weight) for name, weight in zip("ab", weights, strict=True)]
    requests: dict[str, list[Request]] = {"a": [], "b": []}
    index, most = 0, 0.0
    for step in range(250):
        for owner, depth in zip(owners, (9, 3), strict=True):
            own = requests[owner.account]
            while sum(request not in loop.admitted for request in own[-depth:]) < depth:
                own.append(add(loop, index, owner, *sizes[index % len(sizes)]))
                index += 1
        loop.step()
        if step % 50 == 49:
            a, b = (_cost(requests[owner.account]) / owner.weight for owner in owners)
            most = max(most, abs(a - b))
    return most


def _cost(requests: list[Request]) -> float:
    prompts = sum(s.num_prompt_tokens for r in requests if (s := r.sequences[0]).num_output_tokens)
    outputs = sum(r.sequences[0].num_output_tokens for r in requests)
    return PROMPT_COST * prompts + OUTPUT_COST * outputs


def test_owners_of_which_nothing_runs_cost_nothing() -> None:
    """A step does as much work beside 1000 of them as beside 10."""
    work = []
    for num_owners in (10, 1000):
        loop = Loop(Limits(tokens=16, seqs=2, num_blocks=200, fairness="owner"))
        for index in range(num_owners):
            add(loop, index, Owner(account=str(index)), 4, 50)
        for _ in range(3):
            loop.step()
        work.append(count_work(loop.scheduler.schedule))
    assert work[1] < 1.1 * work[0]
