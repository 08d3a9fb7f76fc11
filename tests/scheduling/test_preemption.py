"""Which request is preempted when blocks run out, and how it comes back."""

from __future__ import annotations

from tpengine.scheduling import BlockManager, FirstComeFirstServed, Scheduler
from tpengine.sequence import Request, SequenceStatus

from .fake_engine import (
    add,
    engine_of,
    make_config,
    make_request,
    one_token_each,
    sizes,
    statuses,
)


def test_the_latest_is_preempted_and_comes_back_first() -> None:
    engine = engine_of(num_blocks=6)
    first, second, third, fourth = add(engine, 8, 8, 8, 8)
    assert len(engine.step().rows) == 3
    times = [request.metrics.first_scheduled_time for request in (first, second, third, fourth)]
    assert times[3] is None
    assert None not in times[:3]
    output = engine.step()  # each wants a third block: 4 of 6 are left to two of them
    assert output.preempted == [third]
    assert output.rows == [*first.sequences, *second.sequences]
    assert output.step_input.freed_slots == [2]
    assert [slot for slot, _ in output.step_input.new_block_ids] == [0, 1]
    assert statuses([third]) == ["WAITING"]
    assert third.sequences[0].num_computed_tokens == 0
    assert third.sequences[0].num_output_tokens == 1
    assert third.metrics.num_preemptions == 1
    assert engine.scheduler.num_waiting == 2
    order: list[Request] = []
    while engine.scheduler.has_unfinished_requests():
        new_slots = {new.slot for new in engine.step().step_input.new_sequences}
        order += [r for r in (first, second, third, fourth) if r.sequences[0].slot in new_slots]
    assert order.index(third) < order.index(fourth)
    assert third.metrics.first_scheduled_time == times[2]
    engine.run()
    assert set(engine.endings.values()) == {SequenceStatus.FINISHED_LENGTH}


def test_two_preempted_requests_keep_their_order() -> None:
    engine = engine_of(tokens=100, num_blocks=15, block_size=1)
    first, second, third = add(engine, 9, 3, 3)
    engine.step()
    output = engine.step()
    assert output.preempted == [third]  # its 3 blocks serve first and second: 1 is left
    output = engine.step()
    assert output.preempted == [second]
    assert [request.request_id for request in engine.scheduler._queues.waiting] == ["r1", "r2"]
    assert output.rows == first.sequences
    engine.run()


def test_no_preemption_for_a_row_beyond_the_budget() -> None:
    engine = engine_of(tokens=2, num_blocks=5, block_size=1, chunked=False)
    first, second, _ = add(engine, 1, 1, 1)
    assert sizes(engine.step()) == [1, 1]
    assert sizes(engine.step()) == [1]
    output = engine.step()  # the third would need a sixth block, but has no turn
    assert output.rows == [*first.sequences, *second.sequences]
    assert output.preempted == []
    engine.run()


class _PreemptedLast(FirstComeFirstServed):
    """Another policy: a preempted request goes to the end of the queue."""

    def put_back(self, request: Request) -> None:
        self.add(request)


def test_no_admission_in_a_step_that_preempted() -> None:
    scheduler = Scheduler(make_config(), BlockManager(5, 4), _PreemptedLast())
    first, second, third = (make_request(index, n) for index, n in enumerate((8, 12, 4)))
    for request in (first, second, third):
        scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.rows == [*first.sequences, *second.sequences]
    scheduler.update(output, one_token_each(output))
    output = scheduler.schedule()
    assert output.preempted == [second]
    assert output.rows == first.sequences  # although a block of the three that came free is enough
    scheduler.update(output, one_token_each(output))
    assert scheduler.schedule().rows == [*first.sequences, *third.sequences]
    scheduler.check_invariants()


def test_a_request_can_preempt_itself() -> None:
    engine = engine_of(num_blocks=4)
    first, second = add(engine, 7, 8)
    engine.step()
    output = engine.step()  # first has room for one more token, second has not
    assert output.preempted == [second]
    assert output.rows == first.sequences
    assert not output.step_input.new_sequences
    engine.run()


def test_alone_and_out_of_blocks_ends_as_ignored() -> None:
    engine = engine_of(num_blocks=2)
    (request,) = add(engine, 6)
    for _ in range(3):
        assert engine.step().rows == request.sequences
    output = engine.step()
    assert output.is_empty
    assert output.ignored == [request]
    assert request.sequences[0].num_output_tokens == 3
    assert request.error is not None
    assert "9 tokens (prompt and output) need 3 blocks of 4" in request.error
    assert "lower max_tokens" in request.error
    # Its slot is told with the next step that is sent.
    add(engine, 3, first=1)
    assert engine.step().step_input.freed_slots == [0]


def test_resumed_longer_than_a_step_is_computed_in_parts() -> None:
    """Without chunked prefill its prompt fitted, so it must not be given up."""
    engine = engine_of(tokens=9, num_blocks=6, chunked=False)
    requests = add(engine, 8, 8, max_tokens=12)
    engine.run()
    assert statuses(requests) == ["FINISHED_LENGTH"] * 2
    assert engine.events["preempted"] > 0
    assert engine.events["chunks"] > 0
