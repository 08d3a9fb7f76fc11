"""A process of `tpengine` at a terminal: what a person types, and sees."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

START_S = 60.0
END_S = 10.0
"""One second, on a loaded machine."""


class Terminal:
    """A process of `tpengine` at a terminal."""

    def __init__(self, *words: str) -> None:
        self._keys, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        """Presses keys; \\x03 is Ctrl-C."""
        os.write(self._keys, keys.encode())

    def ask(self, question: str) -> None:
        """Types a question, and waits for the beginning of the answer."""
        self.type(f"{question}\n")
        self.read_until("\r\n")  # the echo
        self.read_until(" ")

    def read_until(self, words: str) -> str:
        """The output until these words appear."""
        shown = self._collect(words, START_S)
        assert words in shown, shown
        return shown

    def interrupt(self, words: str) -> str:
        """Presses Ctrl-C, and again while these words do not come: readline does not see a signal
        that comes just before it waits for a key. Returns the output until they appear."""
        shown, deadline = "", time.monotonic() + START_S
        while words not in shown:
            assert time.monotonic() < deadline, shown
            self.type("\x03")
            shown += self._collect(words, END_S)
        return shown

    def interrupt_to_the_end(self) -> int:
        """Presses Ctrl-C, likewise again, until the process ends. Returns its status."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.type("\x03")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        return self.process.wait(0)

    def _collect(self, words: str, limit_s: float) -> str:
        shown, deadline = b"", time.monotonic() + limit_s
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while words.encode() not in shown and time.monotonic() < deadline:
                if select.select([self._keys], [], [], 0.1)[0]:
                    shown += os.read(self._keys, 4096)  # may end within a character
        return shown.decode(errors="replace")

    def read_rest(self) -> str:
        """The rest of the output of a process that has ended."""
        return self._collect("\0", END_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(START_S)
        os.close(self._keys)


def main() -> None:
    """Runs `tpengine` with the words of the command line, at the terminal of standard input."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    from tpengine.cli.main import main as run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
