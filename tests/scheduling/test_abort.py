"""Requests that are aborted, in every state."""

from __future__ import annotations

from functools import partial

from support.costs import count_work

from tpengine.scheduling.sequence import SequenceStatus
from tpengine.scheduling.step import StepDecisions

from .loop import Limits, Loop, make_request, statuses


def test_abort_of_a_preempted_request() -> None:
    loop = Loop(Limits(num_blocks=4))
    _, second = loop.add_plain(8, 8)
    loop.step()
    assert loop.step().preempted == [second]
    loop.end(second)
    assert loop.scheduler.num_waiting == 0
    loop.run()


def test_abort_while_a_step_is_computed() -> None:
    loop = Loop()
    first, second = loop.add_plain(4, 5)
    loop.step(lambda: loop.end(first))
    assert first.sequences[0].num_output_tokens == 0
    assert second.sequences[0].num_output_tokens == 1
    assert loop.step().step_input.freed_slots == [0]
    loop.run()


def test_abort_after_the_last_token_comes_too_late() -> None:
    loop = Loop()
    (request,) = loop.add_plain(4)
    loop.scheduler.schedule()
    finished = [(request.sequences[0], SequenceStatus.FINISHED_STOPPED)]
    decisions = StepDecisions(tokens=[(request.sequences[0], 1)], finished=finished)
    loop.scheduler.update(decisions)
    assert loop.scheduler.abort_request("r0") is None
    assert statuses(request) == ["FINISHED_STOPPED"]
    assert request.sequences[0].output_token_ids == [1]
    assert not loop.scheduler.has_unfinished_requests()
    loop.scheduler.check_invariants()


def test_aborts_of_waiting_requests_cost_in_proportion() -> None:
    """From the end and from the front. A search for each would cost a hundred times as much for ten
    times as many."""

    def abort_all(loop: Loop, count: int) -> None:
        for index in [*range(count - 1, -1, -2), *range(0, count, 2)]:
            loop.scheduler.abort_request(f"r{index}")
            if loop.scheduler.num_waiting:
                loop.policy.head()
        assert not loop.scheduler.has_unfinished_requests()

    works = []
    for count in (100, 1000):
        loop = Loop()
        for index in range(count):
            loop.scheduler.add_request(make_request(index, [1]))
        works.append(count_work(partial(abort_all, loop, count)))
    assert works[1] < 20 * works[0]
