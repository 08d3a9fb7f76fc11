"""Decodes pictures in a process that can be ended: the caller's side.

Pictures come from clients. The libraries that read their formats are written in C, have had holes,
and some small files take all memory or hours. So another process decodes, with bounds on both; see
`decoder_program.py`. It is kept for later pictures, and started anew where it has ended.
"""

from __future__ import annotations

import threading

import numpy as np

from tpengine import envs, host
from tpengine.errors import InvalidPictureError, QueueFullError, RequestFailedError
from tpengine.pictures.decoder_protocol import ANSWER, FORMATS, Outcome, format_of
from tpengine.pictures.picture import DEFAULT_LIMITS, Picture, PictureLimits, require_pillow

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
        self._process: host.Helper | None = None
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
            return self._decode(self._ready(), name, data)
        except OSError as error:
            self._check_open()
            text = "the picture could not be decoded within the limits of memory and time"
            raise InvalidPictureError(f"{text}; send a smaller or simpler one") from error
        finally:
            self._lock.release()

    def _decode(self, process: host.Helper, name: str, data: bytes) -> Picture:
        limits = self.limits
        order = bytes([list(FORMATS).index(name)]) + data
        answer = process.ask(order, limits.timeout_s, ANSWER.size + 3 * limits.max_pixels)
        outcome, height, width = ANSWER.unpack_from(answer)
        if outcome == Outcome.DECODED:
            if len(answer) != ANSWER.size + 3 * height * width or not height * width:
                process.end()
                raise OSError("the answer has another length than its size says")
            pixels = np.frombuffer(answer, np.uint8, offset=ANSWER.size)
            return Picture.of_pixels(pixels.reshape(height, width, 3))
        if outcome == Outcome.WRONG_SIZE:
            limits.check_size(height, width)
        text = f"the picture is a {name} file that is damaged or of a kind that is not supported"
        raise InvalidPictureError(f"{text}; save it anew, as PNG or JPEG")

    def close(self) -> None:
        """Ends the process; a picture that is being decoded fails."""
        self._is_closed = True
        if process := self._process:
            process.end()

    def _ready(self) -> host.Helper:
        """The process, which is started if there is none that waits for an order."""
        self._check_open()
        if self._process is None or not self._process.is_idle:
            limits, inherited = self.limits, envs.for_children()
            setup = (limits.max_pixels, limits.memory_bytes, limits.cpu_s)
            variables = {name: inherited[name] for name in _VARIABLES if name in inherited}
            try:
                if self._process is not None:
                    self._process.end()
                self._process = host.Helper(_PROGRAM, setup, variables | _SET)
            except (OSError, RuntimeError) as error:
                text = f"no process decodes the picture: {error}; try again later"
                raise RequestFailedError(text) from error
        return self._process

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestFailedError("the picture was not decoded: its decoder is closed")
