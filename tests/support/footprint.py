"""What a server holds, so that a test can say that it is what it was."""

from __future__ import annotations

import time

from support.server_process import ServerProcess

_POLL_S = 0.1
_LOOKS = 5
_POOL_THREADS = 4
"""grpc's own pool takes some more when it is busy, and keeps them for a while; a leak is one a call
or a connection, of which there are hundreds."""
Footprint = dict[str, int]
"""Requests by the server's own words, descriptors and threads by the system's."""


def _footprint(server: ServerProcess) -> Footprint:
    loads = server.loads()
    return {
        "blocks": loads.num_total_blocks - loads.num_free_blocks,
        "running": loads.num_running + loads.num_swapped,
        "waiting": loads.num_waiting,
        "open calls": loads.num_open_calls,
        "tasks": loads.num_tasks,
        "descriptors": server.system.num_fds(),
        "threads": server.system.num_threads(),
    }


def footprint_at_rest(server: ServerProcess) -> Footprint:
    """What an idle server may hold: the largest of several moments, as a task that looks at
    something now and then is missing for the moment between two looks."""
    moments = []
    for _ in range(_LOOKS):
        moments.append(_footprint(server))
        time.sleep(_POLL_S)
    most = max(moments, key=lambda moment: moment["tasks"])
    assert most["blocks"] == 0
    return {**most, "threads": most["threads"] + _POOL_THREADS}


def assert_settles(server: ServerProcess, before: Footprint, timeout_s: float = 60.0) -> None:
    """Waits until the server holds nothing that it did not hold before."""
    deadline = time.monotonic() + timeout_s
    while more := {
        name: (before[name], now) for name, now in _footprint(server).items() if now > before[name]
    }:
        assert time.monotonic() < deadline, f"held after {timeout_s} s (before, now): {more}"
        time.sleep(_POLL_S)
