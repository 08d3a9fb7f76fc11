"""The package's logger: short lines on stderr; the level is `TPENGINE_LOG_LEVEL`."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading

from tpengine import envs

_FORMAT = logging.Formatter(
    "%(levelname)s %(asctime)s %(name)s] %(message)s", datefmt="%m-%d %H:%M:%S"
)
_MAX_LINES = 4096
_FLUSH_S = 2.0
_POLL_MS = 1000
STDOUT, STDERR = 1, 2


def init_logger(name: str) -> logging.Logger:
    """Returns the logger `name`; the first call installs the handler of the package."""
    root = logging.getLogger("tpengine")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_FORMAT)
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)


class LineWriter(logging.Handler):
    """Writes lines on a thread of its own, since a write to a full pipe that no process reads waits
    for ever. While `_MAX_LINES` wait, further ones are lost; the next line after them says how
    many.

    Args:
        file: the descriptor that gets the lines.
    """

    def __init__(self, file: int) -> None:
        super().__init__()
        self.setFormatter(_FORMAT)
        self._file = file
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._putting = threading.RLock()  # an object that is freed meanwhile may log
        self._num_lost = 0
        threading.Thread(target=self._write_lines, name="tpengine-lines", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self.put(self.format(record))

    def put(self, line: str | threading.Event) -> None:
        """Has a line written, or an event set after the lines before it; does not wait for that."""
        with self._putting:
            if isinstance(line, str) and self._lines.qsize() >= _MAX_LINES:
                self._num_lost += 1
                return
            if self._num_lost:
                lost = f"WARNING: {self._num_lost} lines were lost here, as nothing read them"
                self._lines.put(lost)
                self._num_lost = 0
            self._lines.put(line)

    def flush(self, seconds: float = _FLUSH_S) -> None:
        """Waits until all lines are written, for so many seconds at most."""
        written = threading.Event()
        self.put(written)
        written.wait(seconds)

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                _write(self._file, line)


def _write(file: int, line: str) -> None:
    left = f"{line}\n".encode(errors="replace")
    ready = select.poll()
    ready.register(file, select.POLLOUT)
    with contextlib.suppress(OSError):  # it may be closed
        while left:
            try:
                left = left[os.write(file, left) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                ready.poll(_POLL_MS)


_writers: dict[int, LineWriter] = {}


def write_on_threads() -> None:
    """From now on threads write the lines of this process, those of other loggers too."""
    _writers.update({file: LineWriter(file) for file in (STDOUT, STDERR)})
    root, writer = logging.getLogger("tpengine"), _writers[STDERR]
    root.handlers = [h for h in root.handlers if not isinstance(h, logging.StreamHandler)]
    root.addHandler(writer)
    logging.lastResort = writer


def write_line(file: int, line: str) -> None:
    """Writes a line to a descriptor, by its thread if it has one."""
    if file in _writers:
        _writers[file].put(line)
    else:
        _write(file, line)


def flush_lines(seconds: float) -> None:
    """Waits until the threads have written all lines, for so many seconds at most each."""
    for writer in _writers.values():
        writer.flush(seconds)
