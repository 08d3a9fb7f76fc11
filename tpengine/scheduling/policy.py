"""Who is admitted next, and who gives way when blocks run out.

A policy keeps the waiting requests, and ranks all: the scheduler keeps what runs and what is
swapped out in order of rank, serves the first, and preempts the last. To add a policy, derive from
`FirstComeFirstServed` if it is a matter of rank alone (as `Priority` does), or implement
`SchedulingPolicy`; name it in `POLICIES`, and `EngineArgs.scheduling_policy` offers it.

A rank must not change while its request is unfinished, and no two requests may have the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from tpengine.sequence import Request

Rank = tuple[int, int]


class SchedulingPolicy(Protocol):
    """The waiting requests in their order, and the rank of any."""

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, next first."""
        ...

    def rank(self, request: Request) -> Rank:
        """The request's place among those that run or are swapped out; the lowest is served
        first, and the highest is preempted first."""
        ...

    def add(self, request: Request) -> None:
        """Takes a request in that has just arrived."""
        ...

    def put_back(self, request: Request) -> None:
        """Takes a preempted request in: it ran already, so it comes before those that did not."""
        ...

    def head(self) -> Request:
        """The request to admit next; it stays in. There must be one."""
        ...

    def remove(self, request: Request) -> None:
        """Takes a waiting request out: it was admitted, or will never be."""
        ...


class FirstComeFirstServed:
    """Order of arrival; the victim is the one that arrived last.

    The victim goes to the front of the queue. It is younger than all that still run and older than
    all that wait, so queue and running list stay in order of arrival, and the oldest request is
    never a victim while another runs: it always makes progress.
    """

    def __init__(self) -> None:
        # Keyed by id, so that a request in the middle is taken out in constant time; unlike a
        # plain dict, its first entry is found in constant time after many removals.
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def rank(self, request: Request) -> Rank:
        """By arrival."""
        return request.arrival_index, 0

    def add(self, request: Request) -> None:
        """Puts the request at the end."""
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Puts the request at the front."""
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        """The request that has waited longest."""
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        """Takes the request out."""
        del self._waiting[request.request_id]


class Priority:
    """Lower `Request.priority` first, within a bound: starvation ends after so many arrivals.

    A request stands `stride` arrivals further back for each unit of its priority. So of those that
    come later, at most `stride * d` are served before it for each difference d to their priority;
    whatever keeps arriving, it has its turn. Among equals the order is that of arrival.

    Args:
        stride: arrivals that a unit of priority is worth.
    """

    def __init__(self, stride: int = 256) -> None:
        self._stride = stride
        self._waiting: list[Request] = []  # by rank

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def rank(self, request: Request) -> Rank:
        """By arrival, moved by priority."""
        moved = request.arrival_index + self._stride * request.priority
        return moved, request.arrival_index

    def add(self, request: Request) -> None:
        """Puts the request at its place."""
        insort(self._waiting, request, key=self.rank)

    def put_back(self, request: Request) -> None:
        """Puts the request at its place: one that is worth more may have come meanwhile."""
        self.add(request)

    def head(self) -> Request:
        """The request of the lowest rank."""
        return self._waiting[0]

    def remove(self, request: Request) -> None:
        """Takes the request out."""
        del self._waiting[bisect_left(self._waiting, self.rank(request), key=self.rank)]


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
}
"""Policies by the name that `EngineArgs.scheduling_policy` takes."""
