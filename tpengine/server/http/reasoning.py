"""Splits an answer into the model's reasoning, which is between think tags, and its content."""

from __future__ import annotations

import enum

from tpengine.structured.constraints import THINK_CLOSING, THINK_OPENING

THOUGHT_FIELDS = ("reasoning", "reasoning_content")
"""Of a message, for its reasoning. Clients, servers and templates know the one or the other."""
_MAX_SPACE = 64
"""Characters of white space before the opening tag; after more the answer is content."""


class _Part(enum.Enum):
    """What the next character of an answer belongs to."""

    START = enum.auto()
    """Not known yet: the answer has white space, or a part of the opening tag."""
    REASONING = enum.auto()
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Splits the text of one answer as it grows.

    Only an answer that begins with the opening tag, after white space, has reasoning; or one whose
    prompt ends with that tag. Text that may be part of a tag is held back. The result does not
    depend on where the text is cut.

    Args:
        prompt: the text that the model continues; None: not known.
    """

    def __init__(self, prompt: str | None) -> None:
        is_open = prompt is not None and prompt.rstrip().endswith(THINK_OPENING)
        self._part = _Part.REASONING if is_open else _Part.START
        self._held = ""

    @property
    def is_over(self) -> bool:
        """Whether all further text is content."""
        return self._part is _Part.CONTENT

    def take(self, text: str, is_last: bool) -> tuple[str, str]:
        """Takes the next piece of the answer.

        Args:
            is_last: no more text comes; nothing is held back.

        Returns:
            Reasoning, and the content after it.
        """
        text, self._held = self._held + text, ""
        if self._part is _Part.START:
            text = self._begin(text, is_last)
        if self._part is _Part.CONTENT:
            return "", text
        if self._part is _Part.START:
            return "", ""
        reasoning, tag, content = text.partition(THINK_CLOSING)
        if tag:
            self._part = _Part.CONTENT
        elif not is_last:
            reasoning, self._held = _cut(text)
        return reasoning, content

    def _begin(self, text: str, is_last: bool) -> str:
        """Decides whether the answer has reasoning; returns the text after the opening tag."""
        bare = text.lstrip()
        fits = len(text) - len(bare) <= _MAX_SPACE
        if fits and bare.startswith(THINK_OPENING):
            self._part = _Part.REASONING
            return bare[len(THINK_OPENING) :]
        if fits and THINK_OPENING.startswith(bare) and not is_last:
            self._held = text
        else:
            self._part = _Part.CONTENT
        return text


def _cut(text: str) -> tuple[str, str]:
    """Cuts off the longest end of a text with which the closing tag may begin."""
    for length in range(min(len(THINK_CLOSING) - 1, len(text)), 0, -1):
        if THINK_CLOSING.startswith(text[-length:]):
            return text[:-length], text[-length:]
    return text, ""
