"""A bell that a thread in `poll` hears."""

from __future__ import annotations

import os
import threading


class Alarm:
    """Wakes a `poll`, once and for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable after `ring`; -1 once closed."""
        return -1 if self._file is None else self._file

    def ring(self) -> None:
        """Wakes who waits, and whoever will."""
        with self._lock:
            if self._file is not None:
                os.eventfd_write(self._file, 1)

    def close(self) -> None:
        """Nobody waits any more; `ring` then does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.close(file)
