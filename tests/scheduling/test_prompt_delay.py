"""Waiting prompts gather while others run (`scheduler_delay_factor`), by a clock of the test."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from tpengine.inputs import Owner

from .loop import Limits, Loop, make_request, plain

EVERY_WAY: list[dict[str, Any]] = [{}, {"chunked": False}, {"fairness": "owner"}]


@pytest.mark.parametrize("way", EVERY_WAY, ids=str)
def test_prompts_gather_until_the_first_has_waited(monkeypatch: Any, way: dict[str, Any]) -> None:
    """A step with a prompt took 1.5 s, and the factor is 2: they are admitted after 3 s."""
    loop, clock = Loop(Limits(delay=2.0, **way)), Mock()
    monkeypatch.setattr("tpengine.scheduling.scheduler.time", clock)

    def add(number: int) -> None:
        """Adds a request that arrives at the second of this number."""
        loop.add(make_request(number, 5, plain(32), owner=Owner("", f"client {number}")))

    def step(begin: float, end: float) -> set[int]:
        """Numbers of the requests of a step that the ranks compute in this time."""
        clock.time.return_value = clock.perf_counter.return_value = begin
        output = loop.step(lambda: clock.perf_counter.configure_mock(return_value=end))
        return {row.seq_id // 100 for row in output.rows}

    add(0)
    assert step(0.0, 1.5) == {0}, "nothing runs"
    add(1)
    assert step(1.5, 2.5) == {0}
    add(2)
    assert step(2.5, 4.0) == {0}
    assert step(4.0, 4.25) == {0}, "the first has waited for 3 s, not longer"
    admitted = {1, 2} if way == {"chunked": False} else {0, 1, 2}
    assert step(4.25, 4.375) == admitted, "the second, which waited for 2.25 s, comes too"
    add(4)  # the latest step with prompts took 0.125 s
    assert step(4.375, 5.0) >= {4}
    loop.run()


@pytest.mark.parametrize("way", [*EVERY_WAY, {"in_flight": 2}, {"num_host_blocks": 8}], ids=str)
def test_an_endless_delay_ends_when_nothing_runs(way: dict[str, Any]) -> None:
    loop = Loop(Limits(delay=1e12, num_blocks=16, **way))
    loop.add_plain(9, 9, 9)
    loop.step()
    loop.add_plain(9, 9, first=3)
    loop.run()
    assert len(loop.endings) == 5
    early, late = [request.arrival_index for request in loop.admitted[:3]], loop.admitted[3:]
    assert (sorted(early), len(late)) == ([0, 1, 2], 2)
