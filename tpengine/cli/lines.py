"""The lines that commands read: from a file, a pipe, or a person at a terminal."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tpengine.errors import ConfigError, InvalidPictureError, InvalidPromptError
from tpengine.host import print_note
from tpengine.pictures.decoder_protocol import format_of
from tpengine.pictures.picture import DEFAULT_LIMITS


@dataclass(frozen=True)
class Line:
    """A line, or several that belong together.

    Attributes:
        number: of the first one in its source, from 1.
        text: bytes that are not UTF-8 are lone surrogates.
    """

    number: int
    text: str
    source: str = "the input"

    def checked(self) -> str:
        """Returns the text.

        Raises:
            InvalidPromptError: it is not UTF-8.
        """
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            number = self.number + self.text.count("\n", 0, error.start)
            raise InvalidPromptError(
                f"line {number} of {self.source} is not UTF-8; convert it, with iconv for instance"
            ) from error
        return self.text


def is_typed() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_lines(path: str | None = None) -> Iterator[Line]:
    """Yields the lines of a file; None: of standard input.

    Raises:
        ConfigError: it cannot be read.
    """
    named = partial(open, path, encoding="utf-8", errors="surrogateescape")
    try:  # standard input is None if it was closed when Python started
        with named() if path else nullcontext(sys.stdin) as file:
            for number, text in enumerate(file or (), 1):
                yield Line(number, text.removesuffix("\n"), path or "the input")
    except OSError as error:
        raise ConfigError(f"{path or 'standard input'} cannot be read: {error}") from error


def read_picture(path: str) -> bytes:
    """Returns the file of a picture.

    Raises:
        InvalidPictureError: it cannot be read, is too large, or begins as no picture does.
    """
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(DEFAULT_LIMITS.max_bytes + 1)
        DEFAULT_LIMITS.check_bytes(len(data))
        format_of(data)
    except (OSError, ValueError) as error:  # a path may hold a null character
        raise InvalidPictureError(f"the picture {path!r} cannot be read: {error}") from error
    return data


def content_of(text: str, images: Sequence[bytes]) -> str | list[dict[str, Any]]:
    """Returns the content of a message: the text, or parts with the pictures before it."""
    pictures = [{"type": "image", "image": image} for image in images]
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def messages(must_end: Callable[[], bool]) -> Iterator[Line]:
    """Yields the messages of standard input that are not blank. One of several lines begins with
    a space, so that it is no command.

    Raises:
        ConfigError: it cannot be read.
        KeyboardInterrupt: on a second Ctrl-C at an empty line, with nothing typed in between.
    """
    lines = _typed_lines(must_end) if is_typed() else read_lines()
    for line in lines:
        text = line.text
        if text.startswith('"""'):
            while text.count('"""') < 2 and (more := next(lines, None)) is not None:
                text += "\n" + more.text
            text = " " + text.replace('"""', "")
        if text.strip():
            yield Line(line.number, text)


def _typed_lines(must_end: Callable[[], bool]) -> Iterator[Line]:
    """Yields typed lines, and a block of several lines at once. Ctrl-C drops what is typed of a
    line or a block; where nothing is typed, the second one ends the chat."""
    readline: Any = None
    with suppress(ImportError):  # not every Python has it; `input` edits lines with it
        readline = importlib.import_module("readline")
    was_interrupted, block, number = False, "", 0
    while True:
        try:
            number += 1
            block += input("... " if block else "> ") + "\n"
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            is_empty = not block and not (readline and readline.get_line_buffer())
            if must_end() or (was_interrupted and is_empty):
                raise
            was_interrupted, block = is_empty, ""
            if was_interrupted:
                print_note("Ctrl-C once more, or /exit, ends the chat")
        else:
            was_interrupted = False
            if not block.startswith('"""') or block.count('"""') > 1:
                yield Line(number - block.count("\n") + 1, block)
                block = ""
