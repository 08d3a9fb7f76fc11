"""SIGTERM for a command that knows how to end on Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM does what Ctrl-C does, so that whoever waits for the end of a step, or has
    ranks to end, does so. For the main thread, which alone gets signals.

    Raises:
        SystemExit: with `EXIT_CODE`, in the place of the KeyboardInterrupt.
    """
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(number, frame)
        else:  # a shell lets its background jobs ignore Ctrl-C; this is none
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if has_come:
            raise SystemExit(EXIT_CODE) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
