"""Text that appears on standard output while it is generated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def streamed_text() -> Iterator[Callable[[str], None]]:
    """Yields a function that prints text as it comes.

    What is raised in between, also by Ctrl-C, ends the line first: neither an error nor a shell's
    prompt is to stand behind half a sentence.
    """
    is_in_line = False

    def write(text: str) -> None:
        nonlocal is_in_line
        if text:  # said before it is done: Ctrl-C may come in between
            is_in_line = not text.endswith("\n")
        print(text, end="", flush=True)

    try:
        yield write
    except BaseException:
        if is_in_line:
            with contextlib.suppress(OSError):  # it may be that nobody reads any more
                print(flush=True)
        raise
