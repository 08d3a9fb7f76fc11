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
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if wanted & {namespace(pid, kind) for kind in KINDS}:
            pids.append(pid)
    return pids


def children_of(parent: int) -> list[int]:
    """Processes that a process started and that live."""
    return [pid for pid, (_, _, starter) in process_table().items() if starter == parent]


def process_table() -> dict[int, tuple[str, str, int]]:
    """Name, letter of the state, and parent of every process."""
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            head, _, tail = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it ended while we looked
            continue
        state, parent = tail.split()[:2]
        table[int(folder.name)] = (head.partition("(")[2], state, int(parent))
    return table
