"""CPU time of another process by thread, as Linux counts it."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

EVENT_LOOP = "event loop"
ENGINE = "engine"
_ENGINE_THREADS = "tpengine-engine"
"""What the engine's thread calls itself; those that it starts for its kernels inherit the name."""


def thread_times(pid: int) -> Counter[str]:
    """CPU seconds since the start, by name of thread; those of one name are added up.

    The first thread of a Python process, where a server's event loop runs, is `EVENT_LOOP`; threads
    without a name of their own have the program's, as gRPC's poller has.
    """
    times: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            ran_ns = int((task / "schedstat").read_text().split()[0])
            name = (task / "comm").read_text().strip()
            if task.name == str(pid):
                name = EVENT_LOOP
            times[ENGINE if name == _ENGINE_THREADS else name] += ran_ns / 1e9
    return times


def per_token(before: Counter[str], after: Counter[str], num_tokens: int) -> str:
    """What each thread spent between two moments, in µs a token: the engine's, and all others
    together and, if they matter, apart."""
    spent = {name: 1e6 * (after[name] - before[name]) / max(num_tokens, 1) for name in after}
    engine = spent.pop(ENGINE, 0.0)
    parts = sorted(spent.items(), key=lambda item: (item[0] != EVENT_LOOP, -item[1]))
    told = [f"{name} {cost:.1f}" for name, cost in parts if name == EVENT_LOOP or cost >= 0.5]
    return (
        f"server's CPU, µs per output token: {sum(spent.values()):.1f} outside the engine "
        f"({', '.join(told)}), engine {engine:.1f}"
    )
