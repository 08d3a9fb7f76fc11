"""What tpengine says: in errors, and in its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(
    kind: type[Exception] | tuple[type[Exception], ...], words: str
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects an error whose message has all of these words, as in "a limit | what to change"."""
    with pytest.raises(kind) as raised:
        yield raised
    missing = [word for word in words.split(" | ") if word not in str(raised.value)]
    assert not missing, str(raised.value)


@contextmanager
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the log gets meanwhile; the list is filled at the end."""
    logger, messages = logging.getLogger("tpengine"), list[str]()
    logger.addHandler(caplog.handler)
    caplog.clear()
    try:
        yield messages
    finally:
        logger.removeHandler(caplog.handler)
        messages += caplog.messages
