"""Lines that somebody types or pipes in, read beside whatever else the event loop does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

from tpengine.errors import ConfigError
from tpengine.host import streamed_text

_CHUNK_BYTES = 1 << 16


async def read_lines(invitation: str = "") -> AsyncIterator[str]:
    """What standard input has, without empty lines.

    `sys.stdin.readline` would hold the event loop up, and on Ctrl-C asyncio only tells the loop to
    cancel its task: the command would go on until the next line comes.

    Args:
        invitation: shown before each line at a terminal.

    Raises:
        ConfigError: standard input cannot be read.
    """
    if sys.stdin is None:  # it was closed when Python started
        return
    left, at_end = b"", False
    while not at_end:
        with streamed_text() as write:
            if sys.stdin.isatty():
                write(invitation)
            while b"\n" not in left and not at_end:
                more = await _read()
                left, at_end = left + more, not more
            if at_end and invitation and sys.stdin.isatty():
                write("\n")
        line, _, left = left.partition(b"\n")
        # Bytes that are no text become what the server's side refuses, for this line alone.
        text = line.removesuffix(b"\r").decode(sys.stdin.encoding, "surrogateescape")
        if text.strip():
            yield text


async def _read() -> bytes:
    """Some bytes; none at the end. A person may take any time, so that this wait has no limit."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = sys.stdin.fileno()
        try:
            loop.add_reader(descriptor, readable.set)
        except PermissionError:  # epoll's word for files, which keep nobody waiting
            return os.read(descriptor, _CHUNK_BYTES)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
        return os.read(descriptor, _CHUNK_BYTES)
    except OSError as error:
        raise ConfigError(f"standard input cannot be read: {error}") from error
