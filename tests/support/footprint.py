"""What a server holds, so that a test can say that it is what it was."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from support.server_process import ServerProcess

_POLL_S = 0.1
_LOOKS = 5
_POOL_THREADS = 4
"""grpc's own pool takes some more when it is busy, and keeps them for a while; a leak is one a call
or a connection, of which there are hundreds."""


@dataclass(frozen=True)
class Footprint:
    """Requests by the server's own words, descriptors and threads by the system's."""

    free_blocks: int
    running: int
    waiting: int
    open_calls: int
    tasks: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, server: ServerProcess) -> Footprint:
        """Of this moment."""
        loads = server.loads()
        return cls(
            free_blocks=loads.num_free_blocks,
            running=loads.num_running + loads.num_swapped,
            waiting=loads.num_waiting,
            open_calls=loads.num_open_calls,
            tasks=loads.num_tasks,
            descriptors=server.num_file_descriptors(),
            threads=server.num_threads(),
        )

    @classmethod
    def at_rest(cls, server: ServerProcess) -> Footprint:
        """Of an idle server: the largest of several moments, as a task that looks at
        something now and then is missing for the moment between two looks."""
        moments = []
        for _ in range(_LOOKS):
            moments.append(cls.of(server))
            time.sleep(_POLL_S)
        return max(moments, key=lambda moment: moment.tasks)

    def more_than(self, before: Footprint) -> dict[str, tuple[int, int]]:
        """What is held now and was not before, as (before, now); empty: all was given back."""
        now, then = asdict(self), asdict(before)
        more = {name: (then[name], now[name]) for name in now if now[name] > then[name]}
        more.pop("free_blocks", None)
        if now["threads"] <= then["threads"] + _POOL_THREADS:
            more.pop("threads", None)
        if self.free_blocks != before.free_blocks:  # more would be as wrong as fewer
            more["free_blocks"] = (before.free_blocks, self.free_blocks)
        return more


def assert_settles(server: ServerProcess, before: Footprint, timeout_s: float = 60.0) -> None:
    """Waits until the server holds nothing that it did not hold before."""
    deadline = time.monotonic() + timeout_s
    while more := Footprint.of(server).more_than(before):
        assert time.monotonic() < deadline, f"held after {timeout_s} s (before, now): {more}"
        time.sleep(_POLL_S)
