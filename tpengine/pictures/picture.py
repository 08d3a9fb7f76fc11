"""A picture as pixels, and the limits of pictures."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tpengine.errors import ConfigError, InvalidPictureError

Pixels = npt.NDArray[np.uint8]
"""RGB, `[height, width, 3]`."""


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """What one picture may take.

    Attributes:
        max_bytes: of its file.
        max_pixels: width times height, read from the file's header before anything is decoded.
        timeout_s: to decode it; to fetch it, where it has a URL, as much again.
        wait_s: longest wait for pictures of other callers that are decoded first.
        cpu_s: processor time to decode it, in whole seconds.
        memory_bytes: address space of the decoder beyond what it has after its start.

    Raises:
        ConfigError: a limit is zero or less.
    """

    max_bytes: int = 20 << 20
    max_pixels: int = 4096 * 4096
    timeout_s: float = 10.0
    wait_s: float = 60.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(astuple(self)) <= 0:
            raise ConfigError(f"{self}: each limit must be greater than 0")

    def check_bytes(self, count: int) -> None:
        """Refuses a file of so many bytes, or one of which so many have come.

        Raises:
            InvalidPictureError: they are more than `max_bytes`.
        """
        if count > self.max_bytes:
            text = f"the picture has more than {self.max_bytes} bytes, the limit; send less"
            raise InvalidPictureError(text)

    def check_size(self, height: int, width: int) -> None:
        """Refuses a picture of this size.

        Raises:
            InvalidPictureError: it has more than `max_pixels`, or none.
        """
        if not 0 < height * width <= self.max_pixels:
            size = f"the picture has {width} x {height} pixels"
            raise InvalidPictureError(f"{size}; send one with 1 to {self.max_pixels} pixels")


DEFAULT_LIMITS = PictureLimits()


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels that no caller may change. Two pictures are equal if their digests are.

    Attributes:
        pixels: uint8 `[height, width, 3]`, RGB, read-only; upright, and on white where the source
            was transparent.
        digest: SHA-256 over height, width and pixels.
    """

    pixels: Pixels = field(compare=False, repr=False)
    digest: bytes

    @classmethod
    def of_pixels(cls, pixels: Pixels) -> Picture:
        """The picture of an array `[height, width, 3]`, which becomes read-only."""
        pixels = np.ascontiguousarray(pixels)
        pixels.flags.writeable = False
        size = struct.pack("<II", *pixels.shape[:2])
        return cls(pixels, hashlib.sha256(size + pixels.data).digest())


def from_image(image: Any, limits: PictureLimits = DEFAULT_LIMITS) -> Picture:
    """Returns the picture of an object that this program made, so in this process. It is the one
    that `PictureDecoder.decode` returns for the same file.

    Args:
        image: a `PIL.Image.Image`, or an array `[height, width, 3]` of uint8, which is copied.

    Raises:
        InvalidPictureError: it is something else, or too large.
        ConfigError: Pillow is not installed.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            form = f"{image.dtype} {list(image.shape)}"
            raise InvalidPictureError(f"a picture is an array uint8 [height, width, 3], not {form}")
        limits.check_size(*image.shape[:2])
        return Picture.of_pixels(image.copy())
    require_pillow()
    from PIL import Image

    from tpengine.pictures.conversion import to_pixels

    if not isinstance(image, Image.Image):
        text = f"a picture is a PIL.Image.Image or a numpy array, not a {type(image).__name__}"
        raise InvalidPictureError(f"{text}; the bytes of a file and a URL are taken, too")
    limits.check_size(image.height, image.width)
    try:
        return Picture.of_pixels(to_pixels(image))
    except (OSError, ValueError) as error:  # what a lazily read file raises
        text = f"the picture of mode {image.mode} cannot be read or converted to RGB"
        raise InvalidPictureError(text) from error


def require_pillow() -> None:
    """
    Raises:
        ConfigError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("pictures need Pillow, which is missing: install tpengine[pictures]")
