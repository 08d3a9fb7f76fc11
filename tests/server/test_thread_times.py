"""The CPU time of a server by thread, as the benchmark `doors` reads it."""

from __future__ import annotations

import os
import time

from benchmarks.common import EVENT_LOOP, thread_times


def test_cpu_time_is_told_by_thread() -> None:
    before, end = thread_times(os.getpid()), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    spent_s = thread_times(os.getpid())[EVENT_LOOP] - before[EVENT_LOOP]
    assert 0.045 <= spent_s < 5.0
