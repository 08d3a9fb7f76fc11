"""The program that decodes pictures: `python -m` with this module's name.

It can open no file and write none, and ends with its parent; see `host.Helper`.
"""

from __future__ import annotations

import io
import math
import resource
import time
from collections.abc import Callable

from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from tpengine import host
from tpengine.pictures.conversion import to_pixels
from tpengine.pictures.decoder_protocol import ANSWER, FORMATS, Outcome

_IMPORTED = (MpoImagePlugin, TiffImagePlugin, WebPImagePlugin)
"""Pillow would import them for the first picture that needs them; then no file can be opened."""
_STREAMS = 3


def begin(max_pixels: int, memory_bytes: int, cpu_s: int) -> Callable[[bytes], bytes]:
    """Bounds this process; returns what answers an order.

    Args:
        memory_bytes, cpu_s: for one picture.
    """
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = None  # our limit decides
    own_bytes, _ = host.own_memory_bytes()
    host.bound_resource(resource.RLIMIT_AS, own_bytes + memory_bytes, is_final=True)
    host.bound_resource(resource.RLIMIT_NOFILE, _STREAMS, is_final=True)
    host.bound_resource(resource.RLIMIT_FSIZE, 0, is_final=True)

    def answer(order: bytes) -> bytes:
        host.bound_resource(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)
        outcome, size, pixels = _decode(list(FORMATS)[order[0]], order[1:], max_pixels)
        return ANSWER.pack(outcome, *size) + pixels

    return answer


def _decode(name: str, data: bytes, max_pixels: int) -> tuple[Outcome, tuple[int, int], memoryview]:
    """Returns outcome, height and width, and pixels, which are empty unless it is DECODED.

    Raises:
        MemoryError: there is not enough.
    """
    nothing = memoryview(b"")
    try:
        size = _webp_size(data) if name == "WEBP" else (1, 1)
        if math.prod(size) <= max_pixels:
            image = Image.open(io.BytesIO(data), formats=[name])
            size = (image.height, image.width)
        if not 0 < math.prod(size) <= max_pixels:
            return Outcome.WRONG_SIZE, size, nothing
        pixels = to_pixels(image)
        height, width, _ = pixels.shape
        return Outcome.DECODED, (height, width), pixels.data
    except MemoryError:
        raise
    except Exception:  # whatever the library raises over damaged bytes
        return Outcome.DAMAGED, (0, 0), nothing


def _webp_size(data: bytes) -> tuple[int, int]:
    """Height and width of a WebP file, whose canvas Pillow allocates when it opens the file.

    Raises:
        ValueError: its first chunk gives no size.
    """
    match data[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (
                int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28)
            )
        case _:
            raise ValueError("its first chunk is unknown")
    return height, width


if __name__ == "__main__":
    host.answer_orders("tpengine-picture", begin)
