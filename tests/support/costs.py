"""What a piece of work costs, counted: the same on every machine, however loaded it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_work(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs, and functions that it calls, those in C too."""
    count = 0

    def note(*_: Any) -> Any:
        nonlocal count
        count += 1
        return note

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def cost_ratio(costly: Callable[[], object], plain: Callable[[], object]) -> float:
    """Work of `costly` divided by that of `plain`."""
    return count_work(costly) / count_work(plain)
