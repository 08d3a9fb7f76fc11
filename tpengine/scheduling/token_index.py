"""Finds where the last tokens of a text stood before, and what followed them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_PLACES = 32
"""Latest places that are compared; a text may repeat a short match hundreds of times."""


class Match(NamedTuple):
    """A place at which a text's last tokens stand.

    Attributes:
        length: tokens that are equal, up to the limit of the search.
        end: index in `tokens` of the token that follows them.
    """

    length: int
    tokens: Sequence[int]
    end: int


class TokenIndex:
    """Tokens, and the places of each n-gram in them.

    The latest place of an n-gram is in a table, and each place knows the one before it, as in LZ77
    compressors. So a token costs one entry, and a search takes no longer in a long text.

    Args:
        size: tokens of an n-gram, which is the shortest match.
    """

    def __init__(self, size: int) -> None:
        self.tokens: list[int] = []
        self._size = size
        self._latest: dict[tuple[int, ...], int] = {}  # by n-gram, its end
        self._before: list[int] = []  # by end - 1, the end of the same n-gram before it; 0: none

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens."""
        tokens, size, latest = self.tokens, self._size, self._latest
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            gram = tuple(tokens[end - size : end]) if end >= size else ()
            self._before.append(latest.get(gram, 0))
            if gram:
                latest[gram] = end

    def find(self, tail: Sequence[int], longest: int) -> list[Match]:
        """Returns the places at which the longest end of `tail` stands and is followed by a token,
        the latest first. It compares the latest `_MAX_PLACES` places of the last n-gram: a longer
        match before them is not found.

        Args:
            tail: the last tokens of a text, this one or another.
            longest: tokens to compare.
        """
        tokens, matches, best = self.tokens, list[Match](), self._size
        end = self._latest.get(tuple(tail[-self._size :]), 0)
        for _ in range(_MAX_PLACES):
            if not end:
                break
            # Most places are shorter matches: they differ in the first token that would be needed.
            if best <= end < len(tokens) and tokens[end - best] == tail[-best]:
                most, length = min(longest, end, len(tail)), self._size
                while length < most and tokens[end - 1 - length] == tail[-1 - length]:
                    length += 1
                if length > best:
                    matches, best = [], length
                if length == best:
                    matches.append(Match(length, tokens, end))
            end = self._before[end - 1]
        return matches
