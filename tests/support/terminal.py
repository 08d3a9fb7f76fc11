"""A process of `tpengine` at a terminal: what a person types, and sees."""

from __future__ import annotations

import signal
import sys
from functools import partial
from typing import Any

import pexpect

START_S = 60.0
END_S = 10.0
"""One second, on a loaded machine."""


class Terminal(pexpect.spawn):
    """A process of `tpengine` at a terminal."""

    type = pexpect.spawn.send
    """Presses keys; \\x03 is Ctrl-C."""

    def __init__(self, *words: str) -> None:
        command, text = ["-m", "tpengine", *words], {"encoding": "utf-8", "codec_errors": "replace"}
        # A run of the tests in the background ignores Ctrl-C, and so would what it starts.
        obey = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        super().__init__(sys.executable, command, timeout=START_S, preexec_fn=obey, **text)
        self.delaybeforesend = None

    def ask(self, question: str) -> None:
        """Types a question, and waits for the beginning of the answer."""
        self.type(f"{question}\n")
        self.read_until("\r\n")  # the echo
        self.read_until(" ")

    def read_until(self, words: str) -> str:
        """The output until these words appear."""
        self.expect_exact(words)
        return f"{self.before}{words}"

    def interrupt(self, words: Any) -> str:
        """Presses Ctrl-C, and again while these words do not come: readline does not see a signal
        that comes just before it waits for a key. Returns the output until they appear."""
        for _ in range(int(START_S / END_S)):
            self.sendintr()
            if self.expect_exact([words, pexpect.TIMEOUT], END_S) == 0:
                return str(self.before)
        raise AssertionError(self.before)

    def interrupt_to_the_end(self) -> int:
        """Presses Ctrl-C, likewise again, until the process ends. Returns its status."""
        self.interrupt(pexpect.EOF)
        return self.end_status()

    def end_status(self, limit_s: float = START_S) -> int:
        """The status with which the process ends by itself; `before` is the rest of its output."""
        self.expect_exact(pexpect.EOF, limit_s)
        self.close()
        return int(self.exitstatus)
