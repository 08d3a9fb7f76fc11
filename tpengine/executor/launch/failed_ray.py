"""What a Ray that did not start leaves behind: Ray gives no handle of it, ends it when the program
ends, and then not the agents of its raylet."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path

import ray

_PACKAGE = str(Path(ray.__file__).parent)


def ray_children() -> set[int]:
    """This process's children that run programs of Ray; empty where there is no /proc."""
    return {pid for pid in _children_of()[os.getpid()] if _PACKAGE in _command(pid)}


def end_ray_children(but: set[int]) -> None:
    """Kills those that came since, with all that they started."""
    doomed = list(ray_children() - but)
    for pid in doomed:  # grows as it goes; who is stopped starts nothing more
        _send(pid, signal.SIGSTOP)
        doomed += _children_of()[pid]
    for pid in doomed:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children_of() -> defaultdict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and a name may hold any bytes
            parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
            found[int(parent)].append(int(folder.name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
