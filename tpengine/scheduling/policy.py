"""The order of requests: which one is admitted next, and which one is preempted first.

A policy holds the waiting requests, and gives every request a rank. The scheduler keeps running and
swapped requests in order of rank, serves the lowest rank first, and preempts the highest
(`Scheduler._make_room`). To add a policy, implement `SchedulingPolicy` and name it in `POLICIES`;
`EngineArgs.scheduling_policy` then offers it.

No two requests may have the same rank. That of an unfinished request must not change, except
where the queues are sorted by it again (`RequestQueues.begin_step`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from tpengine.scheduling.sequence import Request

Rank = tuple[float, ...]


class SchedulingPolicy(Protocol):
    """The waiting requests in their order, and the rank of each request."""

    def __len__(self) -> int:
        """Number of waiting requests."""

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, the next one first."""

    def rank(self, request: Request) -> Rank:
        """The request's place among running or swapped requests; the lowest rank is served first,
        the highest is preempted first."""

    def add(self, request: Request) -> None:
        """Adds a request that has just arrived, or was preempted."""

    def head(self) -> Request:
        """The request to admit next; it is not removed. There must be one."""

    def remove(self, request: Request) -> None:
        """Removes a waiting request: it was admitted, or has ended."""


class Priority:
    """Lower `Request.priority` first, with a bound on starvation; or order of arrival alone.

    A request is ranked as if it had arrived `stride` arrivals later for each unit of its priority.
    So of the requests that arrive later and have a priority lower by d, at most `stride * d` are
    served before it. Requests of equal priority keep their order of arrival, also when they are
    preempted: such a request is in front of those that arrived later. The lowest rank is never
    preempted while another request runs, so it always makes progress.

    Args:
        stride: arrivals that one unit of priority is worth; 0: first come, first served.
    """

    def __init__(self, stride: int = 256) -> None:
        self._stride = stride
        self._waiting: list[Request] = []  # by rank

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def rank(self, request: Request) -> Rank:
        """The number of its arrival, moved by its priority; then the number itself."""
        moved = request.arrival_index + self._stride * request.priority
        return moved, request.arrival_index

    def add(self, request: Request) -> None:
        """Inserts the request by rank."""
        insort(self._waiting, request, key=self.rank)

    def head(self) -> Request:
        """The request of the lowest rank."""
        return self._waiting[0]

    def remove(self, request: Request) -> None:
        """Removes the request."""
        del self._waiting[bisect_left(self._waiting, self.rank(request), key=self.rank)]


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": partial(Priority, stride=0),
    "priority": Priority,
}
"""Policies by the name that `EngineArgs.scheduling_policy` takes."""
