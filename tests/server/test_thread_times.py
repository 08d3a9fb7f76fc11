"""The CPU time of a server by thread, as `bench serve` reports it."""

from __future__ import annotations

import os
import time

from tpengine.bench.serve import ENGINE, EVENT_LOOP, per_token, thread_times


def test_cpu_time_is_told_by_thread() -> None:
    before, end = thread_times(os.getpid()), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    spent_s = thread_times(os.getpid())[EVENT_LOOP] - before[EVENT_LOOP]
    assert 0.045 <= spent_s < 5.0
    told = per_token(
        {"a": 1.0, "b": 5.0, ENGINE: 7.0},
        {EVENT_LOOP: 3e-4, "a": 1.001, "b": 5.0, ENGINE: 7.002},
        10,
    )
    assert told.endswith(f": 130.0 outside the engine ({EVENT_LOOP} 30.0, a 100.0), engine 200.0")
