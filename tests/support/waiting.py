"""Waits for an event itself, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For an event that only has to come, when other programs use the cores."""


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float = PATIENCE_S,
    what: str = "not true",
    more: Callable[[], str] = str,
    poll_s: float = 0.02,
) -> None:
    """Fails with `what` and `more` if something does not become true in time.

    Args:
        poll_s: between two looks; what starts processes to look should not do so all the time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {timeout_s:g} s\n{more()}"
        time.sleep(poll_s)
