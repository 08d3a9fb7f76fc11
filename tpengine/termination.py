"""SIGTERM and Ctrl-C for a command that runs at a terminal."""

from __future__ import annotations

import contextlib
import os
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


@contextlib.contextmanager
def signals_end_at_once(last_words: str) -> Iterator[None]:
    """Within it SIGTERM and Ctrl-C end the process where it stands, with the exit code that shells
    know. For imports, and where nothing has to be tidied up: an exception that a signal raises in
    the middle of an import is swallowed by some modules, which then are there by half.

    Args:
        last_words: a line for standard error.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:  # to the file itself: an exception is what must not come of this
            os.write(2, f"{last_words}\n".encode())
        except OSError:
            pass
        finally:
            os._exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    if before[signal.SIGINT] is not signal.default_int_handler:
        del before[signal.SIGINT]  # it is ignored, as in a shell's background jobs, or well handled
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
