"""Drivers of their own process, ended whatever becomes of the test that started them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.programs import PYTHONPATH

HERE = Path(__file__).parent


class DriverProcess:
    """A process that says things on its standard output, one JSON value per line.

    Attributes:
        others: lines there that others have written, as Ray may.
    """

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, text=True, **options
        )
        self.others: list[str] = []
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._said.put(line)
        self._said.put(None)

    def hear(self, timeout_s: float = 90.0) -> Any:
        """The next that it says."""
        while True:
            line = self._said.get(timeout=timeout_s)
            assert line is not None, f"{self.process.args} said nothing more"
            try:
                return json.loads(line)
            except ValueError:
                self.others.append(line)

    def say(self, *what: object) -> None:
        """Writes to its standard input, which must be a pipe."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kills it, unless it has ended."""
        self.process.kill()
        self.process.wait(30.0)


@contextmanager
def driver_process(program: str, *args: object, **options: Any) -> Iterator[DriverProcess]:
    """A program of this folder that is running."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    driver = DriverProcess([sys.executable, HERE / program, *args], env=environment, **options)
    try:
        yield driver
    finally:
        driver.end()
