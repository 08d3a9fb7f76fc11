"""The program that decodes pictures: `python -m` with this module's name.

Its arguments are the number of the parent's process, the most pixels, the bytes of memory and the
seconds of a processor. It can open no file and write none, and ends with its parent.
"""

from __future__ import annotations

import io
import math
import os
import resource
import socket
import sys
import time

from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from tpengine import host
from tpengine.pictures.conversion import to_pixels
from tpengine.pictures.decoder_protocol import ANSWER, FORMATS, ORDER, Outcome

_IMPORTED = (MpoImagePlugin, TiffImagePlugin, WebPImagePlugin)
"""Pillow would import them for the first picture that needs them; then no file can be opened."""
_STREAMS = 3


def main() -> None:
    """Serves orders until the other end is closed."""
    parent, max_pixels, memory_bytes, cpu_s = map(int, sys.argv[1:])
    host.end_with_parent(parent, "tpengine-picture")
    Image.preinit()
    Image.MAX_IMAGE_PIXELS = None  # our limit decides
    connection = socket.socket(fileno=0)
    orders = connection.makefile("rb")
    os.dup2(1, 2)  # pictures must not fill the log of the parent
    own_bytes, _ = host.own_memory_bytes()
    host.bound_resource(resource.RLIMIT_AS, own_bytes + memory_bytes, is_final=True)
    host.bound_resource(resource.RLIMIT_NOFILE, _STREAMS, is_final=True)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        host.bound_resource(kind, 0, is_final=True)
    connection.sendall(ANSWER.pack(0, 0, 0))
    while header := orders.read(ORDER.size):
        place, num_bytes = ORDER.unpack(header)
        host.bound_resource(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_s)
        _answer(connection, list(FORMATS)[place], orders.read(num_bytes), max_pixels)


def _answer(connection: socket.socket, name: str, data: bytes, max_pixels: int) -> None:
    """Sends what became of a file, and keeps nothing of it."""
    outcome, size, pixels = _decode(name, data, max_pixels)
    connection.sendall(ANSWER.pack(outcome, *size))
    connection.sendall(pixels)


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
    main()
