"""The bounds of the queue, with fake requests."""

from __future__ import annotations

import time

import pytest

from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.errors import QueueFullError


class Waiting:
    def __init__(self) -> None:
        self.started_at: float | None = None


@pytest.mark.parametrize("bound", ["requests", "tokens"])
def test_a_first_step_ends_the_wait(bound: str) -> None:
    limits = QueueLimits(max_requests=2) if bound == "requests" else QueueLimits(max_tokens=20)
    queue, first, second = Admission(limits), Waiting(), Waiting()
    for request in (first, second):
        queue.enter(request)
        queue.charge(request, 10)

    def another() -> None:
        request = Waiting()
        queue.enter(request)
        queue.charge(request, 10)

    with pytest.raises(QueueFullError):
        another()
    first.started_at = time.time()
    another()
    with pytest.raises(QueueFullError):
        another()
