"""What Linux tells of a process."""

from __future__ import annotations

from pathlib import Path

_NUM_THREADS = 17
START_TICKS = 19


def living_fields(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` from the state on; None: no such process lives.

    One that has ended, and whose parent has not asked how, is none: its memory and files are gone.
    While threads of it are still ending it may hold both, and it is one.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    if fields[0] in "ZX" and int(fields[_NUM_THREADS]) <= 1:
        return None
    return fields


def start_ticks(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None: there is none."""
    fields = living_fields(pid)
    return None if fields is None else int(fields[START_TICKS])
