"""What Ray prints of its own in the driver's process.

When a worker's process ends by a signal, the driver's Ray prints a long message on standard output.
Of a rank the engine says so itself, once, with the cause, in its log. Of others the first one is
logged, and those that follow soon are not: of a rank that Ray cannot start the engine does not know
the process. What Ray prints of its own processes goes to the log, too, one line of each message.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray

from tpengine.logger import init_logger

logger = init_logger(__name__)
_DEATH = re.compile(r"A worker died or was killed .*Node ID: (\w+) .*Worker PID: (\d+)", re.DOTALL)
_OWN_PROCESSES = ("raylet", "gcs_server")
_LINE = 300
_APART_S = 60.0
"""Between two deaths that are both logged; more than between two attempts to start a rank."""
_hidden: set[tuple[str, int]] = set()


def hide_deaths(processes: Iterable[tuple[str, int]]) -> None:
    """Keeps Ray from printing the deaths of these (node, process number). Ray has no option for
    it; where a version of Ray has no such function either, its messages are printed."""
    _hidden.update(processes)
    module = ray._private.worker
    write = getattr(module, _NAME, None)
    if write is not None and not hasattr(write, "__wrapped__"):
        setattr(module, _NAME, _quieter(write))


_NAME = "print_to_stdstream"
"""Called with each message of a cluster, before it is printed."""


def _quieter(write: Callable[..., None]) -> Callable[..., None]:
    death_at = -math.inf

    @functools.wraps(write)
    def write_others(data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        nonlocal death_at
        text = next(iter(data.get("lines", ())), "")
        match = _DEATH.match(text)
        if match is not None:
            if (match[1], int(match[2])) in _hidden:
                return
            before, death_at = death_at, time.monotonic()
            if death_at - before < _APART_S:
                return
        if data.get("pid") in _OWN_PROCESSES:
            logger.warning("Ray says: %s", text.partition("\n")[0][:_LINE])
        else:
            write(data, *args, **kwargs)

    return write_others
