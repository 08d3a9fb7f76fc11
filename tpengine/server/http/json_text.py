"""JSON of answers, in which no reader finds the end of a line.

Events are lines. Many readers also split a text at line ends of Unicode that JSON need not escape:
`str.splitlines` of Python, and with it httpx, does.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_LINE_ENDS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def json_bytes(text: str) -> bytes:
    """JSON text in UTF-8, with these line ends escaped; JSON itself escapes the others."""
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
    return text.encode()


class JsonAnswer(JSONResponse):
    """An answer in JSON."""

    def render(self, content: Any) -> bytes:
        return json_bytes(super().render(content).decode())
