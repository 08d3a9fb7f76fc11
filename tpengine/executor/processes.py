"""Processes of this machine: told from later ones of the same number, watched, and ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tpengine.host import START_TICKS, living_fields

_LOG_TAIL_BYTES = 4000
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_STACK_PATIENCE_S = 2.0
_STACK_CHARACTERS = 20_000

# linux/pidfd.h: what the kernel tells of a process by a descriptor that was opened while it lived.
_PIDFD_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, 11 ids, exit code
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xff, 11)

Process = tuple[int, int]
"""Its number and its start in clock ticks since boot."""


def state(process: Process) -> str:
    """Linux's letter for what it is doing, as R runs, S sleeps, T is stopped; empty: it is gone."""
    fields = living_fields(process[0])
    if fields is None or int(fields[START_TICKS]) != process[1]:
        return ""
    return fields[0]


def send_signal(process: Process, number: int) -> None:
    """Sends a signal to a process, if it is still that one."""
    if state(process):
        with contextlib.suppress(OSError):
            os.kill(process[0], number)


def own_error_log() -> str:
    """The file that Ray sends this process's standard error to."""
    try:
        target = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return target if target.startswith("/") else ""


def tail(path: str) -> str:
    """The end of a log file, without Ray's own marks; empty where there is none."""
    try:
        with Path(path or "/").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith(_RAY_MARKS)).strip()


def wait_for_end(processes: Sequence[Process], patience_s: float) -> list[Process]:
    """Waits for processes to go; returns those that did not."""
    deadline = time.monotonic() + patience_s
    left = list(processes)
    while True:
        left = [process for process in left if state(process)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def python_stack(pid: int) -> str:
    """The Python stacks of all threads of a process, also of one that is stopped; or why there are
    none."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        return "(no stack: py-spy is not installed on its node; pip install 'tpengine[ray]')"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_STACK_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stack: {error})"
    if done.returncode != 0:
        return f"(no stack: py-spy says: {done.stderr.strip()[-500:]})"
    return done.stdout.strip()[:_STACK_CHARACTERS]


class EndWatch:
    """Learns how processes ended that are not its children, where the kernel tells (Linux 6.15)."""

    def __init__(self) -> None:
        self._files: dict[Process, int] = {}

    def watch(self, processes: Sequence[Process]) -> None:
        """Remembers these processes in place of those before; they must live."""
        self.close()
        for process in processes:
            with contextlib.suppress(OSError):
                self._files[process] = os.pidfd_open(process[0])

    def describe(self, process: Process, patience_s: float) -> str:
        """`killed by signal 9 (SIGKILL)` or `exit code 3`; empty: it lives, or nobody knows.

        Args:
            patience_s: for a process that is about to end.
        """
        deadline = time.monotonic() + patience_s
        file = self._files.get(process)
        if file is None:
            return ""
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.poll(patience_s * 1e3)
        try:
            while (code := _exit_code(file)) is None and time.monotonic() < deadline:
                time.sleep(0.005)  # until its parent, or the kernel, has reaped it
        except OSError:  # the kernel is too old: it will never know
            return ""
        return "" if code is None else describe_exit(code)

    def close(self) -> None:
        """Forgets all processes."""
        while self._files:
            os.close(self._files.popitem()[1])


def _exit_code(pidfd: int) -> int | None:
    """The wait status of a process that was reaped; None: it was not.

    Raises:
        OSError: the kernel cannot tell.
    """
    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, request)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL):
            raise
        return None
    mask, *_, status = _PIDFD_INFO.unpack(request)
    return status if mask & _PIDFD_INFO_EXIT else None


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"killed by signal {number}"
