"""From an image of Pillow, of any mode, to upright RGB."""

from __future__ import annotations

import numpy as np
from PIL import Image

_ORIENTATION = 0x0112
"""The tag of EXIF."""


def to_pixels(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Returns uint8 `[height, width, 3]`, contiguous.

    EXIF's orientation is applied, as browsers do. Transparent places show white. Of 16 bits the
    upper 8 count. Colour profiles are not applied.

    Raises:
        OSError, ValueError: the image's file cannot be read, or its mode has no RGB.
    """
    image.load()  # before `info` is read: PNG may have its chunks at the end
    if image.mode == "F":
        raise ValueError("the range of floating-point levels is not known")
    orientation, key = _orientation(image), image.info.get("transparency")
    if image.mode.startswith("I"):
        grey = np.asarray(image)
        white = (grey == key) if isinstance(key, int) else np.zeros(grey.shape, bool)
        levels = np.where(white, 255, np.clip(grey, 0, 0xFFFF) >> 8).astype(np.uint8)
        pixels = np.repeat(levels[:, :, None], 3, 2)
    else:
        if key is not None or image.mode in ("RGBA", "LA", "PA", "RGBa"):
            background = Image.new("RGBA", image.size, "white")
            background.alpha_composite(image.convert("RGBA"))
            image = background
        pixels = np.asarray(image.convert("RGB"))
    if orientation in (5, 6, 7, 8):  # rows and columns change places
        pixels = pixels.transpose(1, 0, 2)
    down = -1 if orientation in (3, 4, 7, 8) else 1
    right = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(pixels[::down, ::right])


def _orientation(image: Image.Image) -> int:
    """What the image's EXIF says; 1, upright, if it says nothing that can be read."""
    exif = Image.Exif()
    try:  # not `getexif`, which also follows XMP and texts; browsers do not
        exif.load(image.info.get("exif", b""))
        value = exif.get(_ORIENTATION, 1)
    except Exception:  # from damaged EXIF comes almost any
        return 1
    return int(value) if isinstance(value, int) else 1
