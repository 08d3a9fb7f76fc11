"""Who is admitted next, and who gives way when blocks run out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from tpengine.sequence import Request


class SchedulingPolicy(Protocol):
    """The waiting requests in their order, and the choice of the victim."""

    def __len__(self) -> int:
        """Number of waiting requests."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, next first."""
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

    def victim(self, running: list[Request]) -> Request:
        """Which of the running requests, in order of admission, gives its blocks up."""
        ...


class FirstComeFirstServed:
    """Order of arrival; the victim is the one that was admitted last.

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

    def victim(self, running: list[Request]) -> Request:
        """The last of `running`."""
        return running[-1]
