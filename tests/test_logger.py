"""Log lines where nothing reads them."""

from __future__ import annotations

import logging
import os

import pytest
from support.waiting import wait_until

from tpengine import logger


@pytest.mark.parametrize("more", [[], ["read again"]])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_lines_that_nothing_reads_are_counted(
    is_blocking: bool, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full pipe holds up no logger; once it is read, a line says how many others are lost,
    also if it is the last one. Other processes may make the pipe one that does not block."""
    monkeypatch.setattr(logger, "_MAX_LINES", 10)
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    filler = os.write(sink, bytes(1 << 20))
    os.set_blocking(sink, is_blocking)
    writer = logger.LineWriter(sink)
    own = logging.getLogger("of the test")
    own.propagate = False
    own.handlers = [writer]
    own.warning("stuck")
    wait_until(writer._lines.empty)  # the thread waits in its write
    for number in range(30):
        own.warning("line %d", number)
    writer.flush(0.0)
    assert len(os.read(source, filler)) == filler
    wait_until(writer._lines.empty)
    for line in more:
        own.warning(line)
    writer.flush()
    said = os.read(source, filler).decode().split("\n")
    lines = [line.partition("] ")[2] or line for line in said]
    lost = "WARNING: 20 lines were lost here, as nothing read them"
    assert lines == ["stuck", *(f"line {number}" for number in range(10)), lost, *more, ""]
    for end in (source, sink):
        os.close(end)
