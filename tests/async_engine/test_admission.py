"""The bounds of the queue, with fake requests."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tpengine.async_engine import admission
from tpengine.async_engine.admission import Admission, QueueLimits
from tpengine.errors import QueueFullError
from tpengine.inputs import NO_OWNER, Owner

SIZE = 100
LIMITS = [QueueLimits(max_requests=SIZE), QueueLimits(max_tokens=10 * SIZE)]


class Waiting:
    """A request that counts how often it is asked whether it has started."""

    def __init__(self, owner: Owner = NO_OWNER) -> None:
        self.owner = owner
        self.start: float | None = None
        self.num_looks = 0

    @property
    def started_at(self) -> float | None:
        self.num_looks += 1
        return self.start


def _add(queue: Admission, owner: Owner = NO_OWNER) -> Waiting:
    """Adds a request of ten tokens."""
    request = Waiting(owner)
    queue.enter(request)
    queue.charge(request, 10)
    return request


@pytest.mark.parametrize("limits", LIMITS, ids=["requests", "tokens"])
def test_a_first_step_ends_the_wait(limits: QueueLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time, monotonic=lambda: 0.0)
    monkeypatch.setattr(admission, "time", clock)
    queue = Admission(limits)
    requests = [_add(queue) for _ in range(SIZE)]
    assert sum(request.num_looks for request in requests) == 0, "there is room without a search"
    for _ in range(SIZE):
        with pytest.raises(QueueFullError):
            _add(queue)
    assert sum(request.num_looks for request in requests) <= SIZE, "not one search a refusal"
    requests[1].start = time.time()
    clock.monotonic = lambda: 1.0
    _add(queue)
    with pytest.raises(QueueFullError):
        _add(queue)
    assert queue.num_tokens == 10 * SIZE


def test_a_request_that_has_finished_leaves() -> None:
    """The retry's time is estimated from the starts, also from those of finished requests."""
    queue = Admission(LIMITS[0])
    requests = [_add(queue) for _ in range(SIZE)]
    for age_s in (1, 2):
        requests[age_s].start = time.time() - age_s
        queue.leave(requests[age_s])
        queue.leave(requests[age_s])  # as if it had been dropped before
        _add(queue)
    with pytest.raises(QueueFullError) as caught:
        _add(queue)
    assert caught.value.retry_after_s == 30.0, "the most: two starts in two seconds, 100 wait"


@pytest.mark.parametrize("limits", LIMITS, ids=["requests", "tokens"])
def test_a_full_queue_has_places_for_owners_below_their_share(limits: QueueLimits) -> None:
    queue = Admission(limits, "owner")
    flood, other, heavy = Owner("a", "a"), Owner("b", "b"), Owner("c", "c", weight=2.0)
    flooding = [_add(queue, flood) for _ in range(SIZE)]
    for owner, num_new, held in ((flood, 0, 100), (other, 50, 50), (heavy, 50, 50), (other, 0, 50)):
        for _ in range(num_new):
            _add(queue, owner)
        part = held if limits.max_requests == SIZE else 10 * held
        with pytest.raises(QueueFullError, match=f"already, {part} of them this client's"):
            _add(queue, owner)
    for request in flooding:
        queue.leave(request)
    assert queue.num_tokens == 10 * SIZE, "each held half of the limit"
    with pytest.raises(QueueFullError):
        _add(queue, other)
    assert _add(queue, flood)
    of_all = Admission(limits)  # it does not know owners
    for number in range(SIZE):
        _add(of_all, (flood, other)[number % 2])
    with pytest.raises(QueueFullError, match=r"100 requests wait|1000 prompt tokens wait"):
        _add(of_all, flood)


@pytest.mark.parametrize("limits", LIMITS, ids=["requests", "tokens"])
def test_very_many_owners_stay_within_the_bound(limits: QueueLimits) -> None:
    queue, num_owners = Admission(limits, "owner"), 1000
    for number in range(num_owners):
        owner = Owner(account=f"address {number}")
        with suppress(QueueFullError):
            for _ in range(SIZE + 1):
                _add(queue, owner)
    assert 3 * SIZE < queue.num_tokens // 10 <= (math.log(num_owners) + 1) * SIZE
