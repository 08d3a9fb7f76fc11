"""What passes between `PictureDecoder` and its process, over one socket.

An order is `ORDER` and the file's bytes; the answer is `ANSWER` and, if the picture was decoded,
its pixels. The process sends an empty `ANSWER` first, when it is ready.
"""

from __future__ import annotations

import enum
import re
import struct

from tpengine.errors import InvalidPictureError

ORDER = struct.Struct("<BI")
"""The format's place in `FORMATS`, and the number of bytes that follow."""
ANSWER = struct.Struct("<BII")
"""An `Outcome`, height and width. 3 x height x width bytes follow if it is DECODED."""
FORMATS = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8[79]a"),
}
"""Pillow's names of all formats that are decoded, and how their files begin."""


def format_of(data: bytes) -> str:
    """Returns Pillow's name of the format of a picture's file.

    Raises:
        InvalidPictureError: the file begins as none of these formats.
    """
    for name, beginning in FORMATS.items():
        if beginning.match(data):
            return name
    text = "the picture is no PNG, JPEG, WebP or GIF file; send it in one of these formats"
    raise InvalidPictureError(text)


class Outcome(enum.IntEnum):
    """How the decoding of a picture has ended. There is no answer if memory or time were too short:
    the process ends."""

    DECODED = 0
    DAMAGED = 1
    WRONG_SIZE = 2
