"""How long the phases of a start take, and what that says of the next start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_LEAST_S, _PATIENCE = 25.0, 5.0
"""What the processes of a later group get to come up: at the least, and in terms of the first's.
Their place may be free only when Ray has ended one that is stopped, which takes it five seconds."""
PROCESSES = "processes"


class StartTimes:
    """The phases of the latest start.

    Args:
        limit_s: of any call in a start.

    Attributes:
        seconds: by phase, in order.
        appear_s: how long new processes may take to say where they are. Until then nobody can look
            at them: the first may take what the user allows, and one of a later group that takes
            far longer than those is frozen, which must not hold up a rebuild.
    """

    def __init__(self, limit_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self.appear_s = limit_s

    def begin(self) -> None:
        """Another start."""
        self.seconds.clear()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the context, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start

    def note_first(self) -> None:
        """The first start went well."""
        self.appear_s = min(self.appear_s, max(_LEAST_S, _PATIENCE * self.seconds[PROCESSES]))

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {spent:.2f} s" for name, spent in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s: {phases}"
