"""Signals that ask a process to end."""

from __future__ import annotations

import math
import os
import queue
import signal
import threading

from tpengine.host import EndSignals, kept_end_handlers

PATIENCE_S = 60.0
TERM, INT, HANG_UP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def test_signals_come_while_the_main_thread_is_held_up() -> None:
    """Each one, but an ignored SIGHUP; after the time that the callback gives the process ends."""
    came: queue.Queue[int] = queue.Queue()
    late = threading.Event()
    ended: list[int] = []
    seconds = {TERM: math.inf, HANG_UP: 1e9, INT: 0.0}

    def note(number: int) -> float:
        came.put(number)
        return seconds[signal.Signals(number)]

    def end(number: int) -> None:
        ended.append(number)
        late.set()

    with kept_end_handlers():
        signal.signal(HANG_UP, signal.SIG_IGN)
        signals = EndSignals(note, end)  # type: ignore[arg-type]
        signals.catch()
        for number in (HANG_UP, TERM):
            os.kill(os.getpid(), number)
        assert came.get(timeout=PATIENCE_S) == TERM
        signal.signal(HANG_UP, signal.SIG_DFL)
        signals.catch()
        for number in (HANG_UP, INT):
            os.kill(os.getpid(), number)
            assert came.get(timeout=PATIENCE_S) == number
        assert late.wait(PATIENCE_S)
        signals.join(PATIENCE_S)
    assert ended == [INT]
    assert signal.set_wakeup_fd(-1) == signals._sink
