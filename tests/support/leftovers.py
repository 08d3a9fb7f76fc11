"""What an engine leaves behind in the process that had it."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.namespaces import children_of
from support.waiting import wait_until


@contextmanager
def nothing_left() -> Iterator[None]:
    """Afterwards this process has no child and no open file that it did not have before.

    Fewer are no fault: what an earlier test had may end only now.
    """
    gc.collect()
    before = _held()
    yield
    wait_until(lambda: _held() <= before, what="left", more=lambda: str(_held() - before))


def _held() -> Counter[str]:
    """The children of this process by number, and its open files by name."""
    held = Counter(f"process {pid}" for pid in children_of(os.getpid()))
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # what lists them
            held[os.readlink(f"/proc/self/fd/{name}")] += 1
    return held
