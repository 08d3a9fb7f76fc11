"""The CPU time of a server by thread, as the benchmark `doors` reads it."""

from __future__ import annotations

import os
import time

from benchmarks.common import ENGINE, EVENT_LOOP, thread_times
from support.server_process import ServerProcess

from tpengine.proto import tpengine_pb2 as pb


def test_cpu_time_is_told_by_thread() -> None:
    before, end = thread_times(os.getpid()), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    spent_s = thread_times(os.getpid())[EVENT_LOOP] - before[EVENT_LOOP]
    assert 0.045 <= spent_s < 5.0


def test_the_engine_is_told_apart(server: ServerProcess) -> None:
    before = thread_times(server.pid)
    server.stub.Generate(
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=64, ignore_eos=True)),
        timeout=30,
    )
    spent = {name: end - before.get(name, 0.0) for name, end in thread_times(server.pid).items()}
    # Nearly all of it is the model's work.
    assert spent[ENGINE] > 0.5 * sum(spent.values())
