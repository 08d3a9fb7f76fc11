"""Which request is preempted when blocks run out, and how it comes back."""

from __future__ import annotations

import pytest

from tpengine.scheduling.policy import POLICIES, Priority
from tpengine.scheduling.sequence import Request

from .loop import Limits, Loop, sizes, statuses


def test_the_latest_is_preempted_and_comes_back_first() -> None:
    loop = Loop(Limits(num_blocks=6))
    first, second, third, fourth = loop.add_plain(8, 8, 8, 8)
    assert len(loop.step().rows) == 3
    times = [request.metrics.first_scheduled_time for request in (first, second, third, fourth)]
    assert times[3] is None
    assert None not in times[:3]
    output = loop.step()  # each wants a third block: 4 of 6 are left to two of them
    assert output.preempted == [third]
    assert output.rows == [*first.sequences, *second.sequences]
    assert output.step_input.freed_slots == [2]
    assert [slot for slot, _ in output.step_input.new_block_ids] == [0, 1]
    assert statuses(third) == ["WAITING"]
    assert third.sequences[0].num_computed_tokens == 0
    assert third.sequences[0].num_output_tokens == 1
    assert third.metrics.num_preemptions == 1
    assert loop.scheduler.num_waiting == 2
    order: list[Request] = []
    while loop.scheduler.has_unfinished_requests():
        new_slots = {new.slot for new in loop.step().step_input.new_sequences}
        order += [r for r in (first, second, third, fourth) if r.sequences[0].slot in new_slots]
    assert order.index(third) < order.index(fourth)
    assert third.metrics.first_scheduled_time == times[2]
    loop.run()
    assert set(loop.endings.values()) == {"length"}


def test_no_preemption_for_a_row_beyond_the_budget() -> None:
    loop = Loop(Limits(tokens=2, num_blocks=5, block_size=1, chunked=False))
    first, second, _ = loop.add_plain(1, 1, 1)
    assert sizes(loop.step()) == [1, 1]
    assert sizes(loop.step()) == [1]
    output = loop.step()  # the third would need a sixth block, but has no turn
    assert output.rows == [*first.sequences, *second.sequences]
    assert output.preempted == []
    loop.run()


class _PreemptedLast(Priority):
    """Another policy: a preempted request goes to the end of the queue."""

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)


def test_no_admission_in_a_step_that_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "fcfs", _PreemptedLast)
    loop = Loop(Limits(num_blocks=5))
    loop.is_in_order = False
    first, second, third = loop.add_plain(8, 12, 4)
    assert loop.step().rows == [*first.sequences, *second.sequences]
    output = loop.step()
    assert output.preempted == [second]
    assert output.rows == first.sequences  # although a block of the three that came free is enough
    assert loop.step().rows == [*first.sequences, *third.sequences]


def test_alone_and_out_of_blocks_ends_as_ignored() -> None:
    loop = Loop(Limits(num_blocks=2))
    (request,) = loop.add_plain(6)
    for _ in range(3):
        assert loop.step().rows == request.sequences
    output = loop.step()
    assert output.is_empty
    assert output.ignored == [request]
    assert request.sequences[0].num_output_tokens == 3
    assert "9 tokens (prompt and output) need 3 blocks of 4" in str(request.error)
    assert "lower max_tokens" in str(request.error)
    # Its slot is told with the next step that is sent.
    loop.add_plain(3, first=1)
    assert loop.step().step_input.freed_slots == [0]


def test_resumed_longer_than_a_step_is_computed_in_parts() -> None:
    """Without chunked prefill its prompt fitted, so it must not be given up."""
    loop = Loop(Limits(tokens=9, num_blocks=6, chunked=False))
    requests = loop.add_plain(8, 8, max_tokens=12)
    loop.run()
    assert statuses(*requests) == ["FINISHED_LENGTH"] * 2
    assert loop.events["single recomputed"] > 0
    assert loop.events["chunks"] > 0
