"""Linux namespaces as `/proc` shows them: which process is in which, and whose child."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

KINDS = {"mnt": "mount", "pid": "pid", "net": "net", "uts": "uts", "ipc": "ipc"}
"""Name in /proc, and as an option of `unshare` and `nsenter`."""
UNSHARE = [
    *("unshare", *(f"--{option}" for option in KINDS.values())),
    *("--fork", "--kill-child=KILL", "--mount-proc", "--propagation=private"),
]
"""Starts a command as the first process of new namespaces, a child of the process started."""


def namespace(pid: int, kind: str) -> str | None:
    """Name of a process's namespace, as `net:[4026531833]`; None: there is no such process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Processes that are in any of them."""
    wanted = set(namespaces)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if wanted & {namespace(pid, kind) for kind in KINDS}:
            found.append(pid)
    return found


def children_of(parent: int) -> list[int]:
    """Processes that a process started and that live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found
