"""Lost workers, caches that shrink, and requests that may not run; random ones are in
`test_random_traces`."""

from __future__ import annotations

from .loop import Loop, statuses


def test_only_those_that_are_allowed_run() -> None:
    loop = Loop()
    first, second, third = loop.add_plain(6, 7, 8)
    loop.step()
    loop.restrict([second.request_id])
    assert statuses(first, second, third) == ["WAITING", "RUNNING", "WAITING"]
    (late,) = loop.add_plain(5, first=3)
    assert loop.scheduler.num_waiting == 3
    output = loop.step()
    assert output.rows == second.sequences
    assert len(output.step_input.freed_slots) == 2
    loop.end(third)
    loop.restrict([late.request_id])
    assert loop.step().rows == late.sequences
    loop.restrict(None)
    assert loop.step().rows == [*late.sequences, *first.sequences, *second.sequences]
    loop.run()
    assert loop.endings[first.request_id] == "length"
