"""What `bench serve` tells of a server's CPU time."""

from __future__ import annotations

import os
import time
from collections import Counter

from tpengine.bench.thread_times import EVENT_LOOP, per_token, thread_times


def test_cpu_time_is_told_by_thread() -> None:
    before, end = thread_times(os.getpid()), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    spent = thread_times(os.getpid()) - before
    assert 0.045 <= spent[EVENT_LOOP] < 5.0
    told = per_token(Counter(a=1.0, b=5.0), Counter({EVENT_LOOP: 3e-4, "a": 1.001, "b": 5.0}), 10)
    assert told.endswith(f": {EVENT_LOOP} 30.0, a 100.0")
