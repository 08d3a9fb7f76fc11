"""Files of pictures, and damaged ones."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def noise(height: int = 19, width: int = 31, num_channels: int = 3) -> np.ndarray:
    """Random uint8 `[height, width, num_channels]`, always the same."""
    return np.random.default_rng(7).integers(0, 256, (height, width, num_channels), np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_orientation(value: int, kind: str) -> bytes:
    """A file whose EXIF has this orientation."""
    exif = Image.Exif()
    exif[0x0112] = value
    image = Image.fromarray(noise(num_channels=3 if kind == "JPEG" else 4))
    return encoded(image, kind, exif=exif)


def chunk(kind: bytes, body: bytes) -> bytes:
    """A chunk of PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG of these chunks after its header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have right checksums, so that what is in them is read; any other file as
    it is."""
    if not data.startswith(b"\x89PNG"):
        return data
    changed, at = bytearray(data), 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 <= len(data):
            changed[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(changed)
