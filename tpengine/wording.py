"""Turns of phrase that messages to people share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that one which nobody knows resembles most; None: it is like none of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that nobody knows; empty if none is like it."""
    close = closest(name, known)
    return "" if close is None else f"; did you mean {close}?"
