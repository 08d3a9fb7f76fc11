"""Processes of this machine: told from later ones of the same number, ended, and their logs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

_LOG_TAIL_BYTES = 4000


def start_ticks(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return None if fields[0] == "Z" else int(fields[19])


def own_error_log() -> str:
    """The file that Ray sends this process's standard error to."""
    try:
        target = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return target if target.startswith("/") else ""


def tail(path: str) -> str:
    """The end of a log file; empty where there is none."""
    try:
        with Path(path or "/").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def wait_for_end(processes: Sequence[tuple[int, int]], patience_s: float) -> list[tuple[int, int]]:
    """Waits for processes, given as (number, start ticks), to go; returns those that did not."""
    deadline = time.monotonic() + patience_s
    left = list(processes)
    while True:
        left = [(pid, started) for pid, started in left if start_ticks(pid) == started]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def end_processes(processes: Sequence[tuple[int, int]], patience_s: float) -> None:
    """Waits for processes to go, then kills what is left."""
    for pid, _ in wait_for_end(processes, patience_s):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
