"""Decodes pictures in a process that can be ended: the caller's side.

Pictures come from clients. The libraries that read their formats are written in C, have had holes,
and some small files take all memory or hours. So another process decodes, with bounds on both; see
`decoder_program.py`. It is kept for later pictures, and started anew where it has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np

from tpengine import envs, host
from tpengine.errors import InvalidPictureError, QueueFullError, RequestFailedError
from tpengine.pictures.decoder_protocol import ANSWER, FORMATS, ORDER, Outcome, format_of
from tpengine.pictures.picture import DEFAULT_LIMITS, Picture, PictureLimits, require_pillow

_START_S, _END_S = 60.0, 5.0
_PROGRAM = "tpengine.pictures.decoder_program"
"""By name: an import of it would import Pillow."""
_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""All that the process gets of this one's environment."""
_SET = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
"""No further threads; and a fixed threshold, so that memory of large pictures is given back."""


class PictureDecoder:
    """Makes pictures of files, one at a time. Any thread may use it.

    Raises:
        ConfigError: Pillow is not installed.
    """

    def __init__(self, limits: PictureLimits = DEFAULT_LIMITS) -> None:
        require_pillow()
        self.limits = limits
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    def decode(self, data: bytes) -> Picture:
        """Returns the picture in a PNG, JPEG, WebP or GIF file; of several frames, the first one.

        Its format is what its first bytes say. EXIF's orientation is applied, transparent places
        become white, and of 16 bits the upper 8 count.

        Raises:
            InvalidPictureError: it is of no such format, damaged, or exceeds a limit.
            QueueFullError: other pictures were decoded for longer than `wait_s`.
            RequestFailedError: there is no process to decode it.
        """
        self.limits.check_bytes(len(data))
        name = format_of(data)
        if not self._lock.acquire(timeout=self.limits.wait_s):
            text = f"other pictures were decoded for more than {self.limits.wait_s:g} s"
            raise QueueFullError(f"{text}; send this one later")
        try:
            return self._ready().decode(name, data)
        except _EndedError as error:
            self._check_open()
            text = "the picture could not be decoded within the limits of memory and time"
            raise InvalidPictureError(f"{text}; send a smaller or simpler one") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process; a picture that is being decoded fails."""
        self._is_closed = True
        if process := self._process:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._process.end()

    def _ready(self) -> _Process:
        """The process, which is started if there is none that waits for an order."""
        self._check_open()
        if self._process is None or not self._process.is_idle:
            try:
                if self._process is not None:
                    self._process.end()
                self._process = _Process(self.limits)
            except (_EndedError, OSError, RuntimeError) as error:
                text = f"no process decodes the picture: {error}; try again later"
                raise RequestFailedError(text) from error
        return self._process

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestFailedError("the picture was not decoded: its decoder is closed")


class _EndedError(Exception):
    """The process has ended, or was ended because it did not answer in time or as it should."""


class _Process:
    """A process that decodes, see `decoder_program.py`, and the thread that starts it and waits for
    its end: the kernel ends it with the thread that has started it, which must not be a caller's.

    Raises:
        _EndedError, OSError, RuntimeError: it cannot be started.
    """

    def __init__(self, limits: PictureLimits) -> None:
        self._limits = limits
        self._started: Future[subprocess.Popen[bytes]] = Future()
        self._socket, theirs = socket.socketpair()
        name, ends = "tpengine-picture-decoder", (limits, theirs, self._started)
        self._keeper = threading.Thread(target=_keep, args=ends, name=name, daemon=True)
        with self._answering(_START_S):
            with theirs:
                host.start_thread(self._keeper)
                self._started.result(_START_S)
            self._receive(ANSWER.size)

    @property
    def is_idle(self) -> bool:
        """Whether it lives, and has sent nothing that no order asked for."""
        if not self._keeper.is_alive() or self._socket.fileno() < 0:
            return False
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def decode(self, name: str, data: bytes) -> Picture:
        """As `PictureDecoder.decode`.

        Args:
            name: of its format.

        Raises:
            InvalidPictureError: the process says so.
            _EndedError: it has ended.
        """
        limits = self._limits
        with self._answering(limits.timeout_s):
            self._send(ORDER.pack(list(FORMATS).index(name), len(data)))
            self._send(data)
            outcome, height, width = ANSWER.unpack(self._receive(ANSWER.size))
            if outcome == Outcome.DECODED:
                if not 0 < height * width <= limits.max_pixels:
                    raise OSError("no such size is allowed")
                pixels = np.frombuffer(self._receive(3 * height * width), np.uint8)
                return Picture.of_pixels(pixels.reshape(height, width, 3))
        if outcome == Outcome.WRONG_SIZE:
            limits.check_size(height, width)
        text = f"the picture is a {name} file that is damaged or of a kind that is not supported"
        raise InvalidPictureError(f"{text}; save it anew, as PNG or JPEG")

    def kill(self) -> None:
        """Has it end; what waits for its answer fails."""
        self._started.result().kill()

    def end(self) -> None:
        """Ends it, and waits until it is gone."""
        self._socket.close()
        if self._started.done() and self._started.exception() is None:
            self.kill()
        self._keeper.join(_END_S)

    @contextlib.contextmanager
    def _answering(self, timeout_s: float) -> Iterator[None]:
        """Context of an order. It ends the process unless the answer is complete."""
        self._deadline = time.monotonic() + timeout_s
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the next order would get this answer
            self.end()
            if isinstance(error, OSError):
                raise _EndedError(str(error)) from error
            raise

    def _send(self, data: bytes) -> None:
        self._set_timeout()
        self._socket.sendall(data)

    def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        left = memoryview(data)
        while left:
            self._set_timeout()
            num_bytes = self._socket.recv_into(left)
            if num_bytes == 0:
                raise OSError("the process has ended")
            left = left[num_bytes:]
        return data

    def _set_timeout(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the process does not answer")
        self._socket.settimeout(left_s)


def _keep(
    limits: PictureLimits, theirs: socket.socket, started: Future[subprocess.Popen[bytes]]
) -> None:
    """Starts a process with this end of its socket, and waits until it ends."""
    values = (os.getpid(), limits.max_pixels, limits.memory_bytes, limits.cpu_s)
    inherited = envs.for_children()
    variables = {name: inherited[name] for name in _VARIABLES if name in inherited}
    try:
        process = subprocess.Popen(
            # -P: as for ranks. -B: it writes nothing
            [sys.executable, "-B", "-P", "-m", _PROGRAM, *map(str, values)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            env=variables | _SET,
            start_new_session=True,  # a Ctrl-C at the terminal is the parent's alone
        )
    except BaseException as error:
        started.set_exception(error)
    else:
        started.set_result(process)
        process.wait()
