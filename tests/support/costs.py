"""What a piece of work costs beside another: a ratio depends less on the machine than a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def cost_ratio(costly: Callable[[], object], plain: Callable[[], object], rounds: int = 5) -> float:
    """CPU time of `costly` divided by that of `plain`: the least of alternating runs of each."""
    times: dict[Callable[[], object], list[float]] = {costly: [], plain: []}
    for _ in range(rounds):
        for work, taken in times.items():
            start = time.thread_time()
            work()
            taken.append(time.thread_time() - start)
    return min(times[costly]) / min(times[plain])
