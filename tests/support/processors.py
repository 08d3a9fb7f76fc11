"""How much of the processors that they want this machine's processes get.

What somebody else takes of the machine is no fault of the engine's: a time that is to be short is
judged by what it would have been about without the waits for a processor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

_LEAST_SHARE = 0.5


class Stopwatch:
    """Seconds since it was made.

    Args:
        pids: of the processes that count; none: all of this machine.

    Attributes:
        start: of the monotonic clock.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before = _thread_times(pids)
        self.start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """By the clock."""
        return time.monotonic() - self.start

    @property
    def share(self) -> float:
        """What the processes' threads got of the processor time that they wanted meanwhile."""
        ran = waited = 0
        for thread, (ran_now, waited_now) in _thread_times(self._pids).items():
            ran_then, waited_then = self._before.get(thread, (0, 0))
            ran += max(0, ran_now - ran_then)
            waited += max(0, waited_now - waited_then)
        return ran / (ran + waited) if ran else 1.0

    @property
    def own_s(self) -> float:
        """About what it would have been, had all had the processors that they wanted; at least
        half of the time, since a process that sleeps until a timeout wants none."""
        elapsed_s = self.elapsed_s
        return elapsed_s * max(self.share, _LEAST_SHARE)


def _thread_times(pids: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread has run, and has waited for a processor; none: not told here."""
    found = {}
    folders = [f"{pid}" for pid in pids] or ["[0-9]*"]
    files = [Path("/proc").glob(f"{folder}/task/[0-9]*/schedstat") for folder in folders]
    for file in chain.from_iterable(files):
        try:
            ran, waited, _ = map(int, file.read_text().split())
        except (OSError, ValueError):  # it ended while we looked
            continue
        found[file.parent.name] = (ran, waited)
    return found
