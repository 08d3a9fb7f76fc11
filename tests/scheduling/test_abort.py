"""Requests that are aborted, in every state."""

from __future__ import annotations

import time

from tpengine.scheduling import StepDecisions
from tpengine.sequence import SequenceStatus

from .fake_engine import add, engine_of, statuses


def test_abort_in_every_state() -> None:
    engine = engine_of(seqs=2, num_blocks=8, tokens=8)
    decoding, chunk, waiting = add(engine, 5, 12, 4)
    engine.step()
    assert chunk.sequences[0].num_computed_tokens == 3
    assert engine.scheduler.abort_request("unknown") is None
    for request in (waiting, chunk, decoding):
        assert engine.scheduler.get_request(request.request_id) is request
        engine.abort(request.request_id)
        engine.scheduler.check_invariants()
        assert statuses([request]) == ["FINISHED_ABORTED"]
        assert engine.scheduler.abort_request(request.request_id) is None
    assert not engine.scheduler.has_unfinished_requests()
    add(engine, 3, first=3)
    output = engine.step()  # slots 0 and 1 are freed and one of them is taken, in one message
    assert sorted(output.step_input.freed_slots) == [0, 1]
    assert output.step_input.new_sequences[0].slot in (0, 1)


def test_abort_of_a_preempted_request() -> None:
    engine = engine_of(num_blocks=4)
    _, second = add(engine, 8, 8)
    engine.step()
    assert engine.step().preempted == [second]
    engine.abort("r1")
    assert engine.scheduler.num_waiting == 0
    engine.run()


def test_abort_while_a_step_is_computed() -> None:
    engine = engine_of()
    first, second = add(engine, 4, 5)
    engine.step(lambda: engine.abort("r0"))
    assert first.sequences[0].num_output_tokens == 0
    assert second.sequences[0].num_output_tokens == 1
    assert engine.step().step_input.freed_slots == [0]
    engine.run()


def test_abort_after_the_last_token_comes_too_late() -> None:
    engine = engine_of()
    (request,) = add(engine, 4)
    output = engine.scheduler.schedule()
    finished = [(request.sequences[0], SequenceStatus.FINISHED_STOPPED)]
    decisions = StepDecisions(tokens=[(request.sequences[0], 1)], finished=finished)
    engine.scheduler.update(output, decisions)
    assert engine.scheduler.abort_request("r0") is None
    assert statuses([request]) == ["FINISHED_STOPPED"]
    assert request.sequences[0].output_token_ids == [1]
    assert not engine.scheduler.has_unfinished_requests()
    engine.scheduler.check_invariants()


def test_an_id_can_be_used_again_when_it_is_free() -> None:
    engine = engine_of()
    add(engine, 4)
    engine.abort("r0")
    engine.endings.clear()
    add(engine, 4)
    engine.run()


def _abort_s(count: int) -> float:
    """Processor seconds to abort so many waiting requests, from the end and from the front."""
    engine = engine_of()
    add(engine, *[3] * count)
    start = time.thread_time()
    for index in range(count - 1, -1, -2):
        engine.scheduler.abort_request(f"r{index}")
    for index in range(0, count, 2):
        engine.scheduler.abort_request(f"r{index}")
        if engine.scheduler.num_waiting:
            engine.scheduler._queues.waiting.head()
    assert not engine.scheduler.has_unfinished_requests()
    return time.thread_time() - start


def test_aborts_of_waiting_requests_take_time_in_proportion() -> None:
    """Ten times as many take about ten times as long, where a search for each would take 100
    times. The best of three, so that a noisy machine does not decide."""
    few, many = (min(_abort_s(count) for _ in range(3)) for count in (1_500, 15_000))
    assert many < 40 * few
