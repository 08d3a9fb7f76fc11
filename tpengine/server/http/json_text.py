"""JSON of answers, in which no reader finds the end of a line.

Events are lines. Many readers also split a text at line ends of Unicode that JSON need not escape:
`str.splitlines` of Python, and with it httpx, does.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import JSONResponse

_LINE_ENDS = {"\x85": rb"\u0085", "\u2028": rb"\u2028", "\u2029": rb"\u2029"}


def json_bytes(value: Any) -> bytes:
    """A value as JSON in UTF-8, with these line ends escaped; JSON itself escapes the others."""
    data = orjson.dumps(value)
    if not data.isascii():
        for character, escape in _LINE_ENDS.items():
            data = data.replace(character.encode(), escape)
    return data


def event(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: %b\n\n" % json_bytes(value)


class JsonAnswer(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
