"""What is done to processes on one node: signals, stacks, logs, and how they ended.

A process is named by its number and its start time, which tells it from a later one with the same
number. How a process ended that is not this one's child, only the kernel can tell (Linux 6.15).

What a rank holds lies in a file without a name, whose descriptor its node's agent keeps open: so it
is there for the rank that replaces it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpengine import host
from tpengine.executor.diagnosis import UNKNOWN
from tpengine.executor.held_files import HeldFiles
from tpengine.host import START_TICKS, living_fields

_LOG_TAIL_BYTES = 4000
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_STACK_PATIENCE_S = 2.0
_STACK_CHARACTERS = 20_000

_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
# linux/pidfd.h: what the kernel tells of a process by a descriptor that was opened while it lived.
_PIDFD_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, 11 ids, exit code
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xff, 11)

Process = tuple[int, int]
"""Its number and its start in clock ticks since boot."""


class NodeAgent:
    """Acts on processes of its own node."""

    def __init__(self) -> None:
        self._files: dict[Process, int] = {}
        self._memory: dict[int, int] = {}  # descriptors, by rank
        self._of_gpus: dict[int, HeldFiles] = {}  # by rank
        self._oom_kills = 0

    def ping(self) -> int:
        """Answers with the number of the agent's own process."""
        return os.getpid()

    def watch(self, processes: Sequence[Process]) -> None:
        """Remembers these processes in place of earlier ones, so that their end can be told. They
        must be alive."""
        _close_all(self._files)
        self._oom_kills = _count_oom_kills()
        for process in processes:
            with contextlib.suppress(OSError):
                self._files[process] = os.pidfd_open(process[0])

    def look(self, process: Process, patience_s: float) -> tuple[str, str]:
        """How a process ended, and its state.

        Args:
            patience_s: for a process that is about to end.

        Returns:
            (`killed by signal 9 (SIGKILL)` or `exit code 3`; empty: it is alive, or unknown,
            Linux's letter for its state; empty: it is gone).
        """
        return self._end_of(process, patience_s), self.state(process)

    def _end_of(self, process: Process, patience_s: float) -> str:
        code = self._wait_status(process, patience_s)
        if code is None:
            return ""
        ended = describe_exit(code)
        is_killed = os.WIFSIGNALED(code) and os.WTERMSIG(code) == signal.SIGKILL
        if is_killed and _count_oom_kills() > self._oom_kills:
            ended += "; meanwhile the kernel has ended a process here for lack of memory"
        return ended

    def has_broken_code(self, process: Process, patience_s: float) -> bool:
        """Whether a process has ended by a signal that the kernel sends for a fault of its code, or
        it is unknown how it ended.

        Args:
            patience_s: see `look`.
        """
        code = self._wait_status(process, patience_s)
        return code is None or (os.WIFSIGNALED(code) and os.WTERMSIG(code) in _FAULTS)

    def _wait_status(self, process: Process, patience_s: float) -> int | None:
        """The wait status of a process that ends; None: it has not, or it is unknown."""
        deadline = time.monotonic() + patience_s
        file = self._files.get(process)
        if file is None:
            return None
        poll = select.poll()
        poll.register(file, select.POLLIN)
        poll.poll(patience_s * 1e3)
        try:
            while (code := self._status(process, file)) is None and time.monotonic() < deadline:
                time.sleep(0.005)  # until its parent, or the kernel, has reaped it
        except OSError:  # the kernel is too old to tell
            return None
        return code

    def _status(self, process: Process, file: int) -> int | None:
        """The wait status of a process that was reaped; None: it was not.

        Args:
            file: its pidfd.

        Raises:
            OSError: the kernel cannot tell.
        """
        request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(file, _PIDFD_GET_INFO, request)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL):
                raise
            return None
        mask, *_, status = _PIDFD_INFO.unpack(request)
        return status if mask & _PIDFD_INFO_EXIT else None

    @staticmethod
    def state(process: Process) -> str:
        """Linux's letter for what it does: R runs, S sleeps, T is stopped; empty: it is gone;
        `UNKNOWN`: there is no file descriptor left to look."""
        try:
            fields = living_fields(process[0])
        except OSError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], 0)  # sends nothing
                return UNKNOWN
            return ""
        if fields is None or int(fields[START_TICKS]) != process[1]:
            return ""
        return fields[0]

    def stack(self, process: Process) -> str:
        """Its Python stacks, or why there are none."""
        return python_stack(process[0]) if self.state(process) else ""

    def tail(self, path: str) -> str:
        """The end of a log file, without Ray's own marks; empty if it cannot be read."""
        try:
            with open(path or "/", "rb", opener=host.open_unlinked) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines if not line.startswith(_RAY_MARKS)).strip()

    def signal(self, process: Process, number: int) -> None:
        """Sends a signal to a process, if it is still that one."""
        file = self._files.get(process)
        with contextlib.suppress(OSError):
            if file is not None:
                signal.pidfd_send_signal(file, number)
            elif self.state(process):
                os.kill(process[0], number)

    def wait_for_end(self, processes: Sequence[Process], patience_s: float) -> list[Process]:
        """Waits for processes to end; returns those that are still there."""
        deadline = time.monotonic() + patience_s
        left = [process for process in processes if self.state(process)]
        while left and time.monotonic() < deadline:
            time.sleep(0.005)
            left = [process for process in left if self.state(process)]
        return left

    def keep_memory(self, rank: int, is_new: bool, on_gpu: bool = False) -> tuple[str, str] | None:
        """Holds a file for what outlives the process of a rank, see `worker/rank_memory.py`.

        Args:
            is_new: in place of an earlier one; False: the one that this agent holds already.
            on_gpu: whether it also holds descriptors of GPU memory that the rank sends.

        Returns:
            The path by which processes of this node open it, and what this path leads to. None:
            this agent does not hold it, as it has replaced the one that did.

        Raises:
            OSError: no descriptor is left.
            RuntimeError: no thread is left.
        """
        if is_new:
            if rank in self._of_gpus:
                self._of_gpus.pop(rank).close()
            if rank in self._memory:
                os.close(self._memory.pop(rank))
            name = f"tpengine rank {rank} {secrets.token_hex(8)}"
            self._memory[rank] = os.memfd_create(name, os.MFD_CLOEXEC)
        if rank not in self._memory:
            return None
        path = f"/proc/{os.getpid()}/fd/{self._memory[rank]}"
        target = os.readlink(path)
        if on_gpu and rank not in self._of_gpus:
            self._of_gpus[rank] = HeldFiles(target)
        return path, target

    def free_memory(self) -> None:
        """Closes the files of `keep_memory`, which no later rank opens; those that live keep
        descriptors of their own."""
        while self._of_gpus:
            self._of_gpus.popitem()[1].close()
        _close_all(self._memory)

    def close(self) -> None:
        """Forgets the processes of `watch`, and closes the files of `keep_memory`."""
        _close_all(self._files)
        self.free_memory()


def _close_all(files: dict[Any, int]) -> None:
    while files:
        os.close(files.popitem()[1])


def _count_oom_kills() -> int:
    """Processes that the kernel has killed since boot for lack of memory, of all containers."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def own_error_log() -> str:
    """The file that this process's standard error goes to; empty if it is not a file."""
    try:
        target = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return target if target.startswith("/") else ""


def python_stack(pid: int) -> str:
    """The Python stacks of all threads of a process, which may be stopped; or why there are
    none."""
    installed = Path(sys.executable).with_name("py-spy")
    program = str(installed) if installed.is_file() else shutil.which("py-spy")
    if program is None:
        return (
            "(no stack: py-spy is not installed on its node; install tpengine with its extra ray)"
        )
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(no stack: {error})"
    if done.returncode != 0:
        return f"(no stack: py-spy says: {done.stderr.strip()[-500:]})"
    return done.stdout.strip()[:_STACK_CHARACTERS]


def describe_exit(status: int) -> str:
    """A wait status in words."""
    if not os.WIFSIGNALED(status):
        return f"exit code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    try:
        return f"killed by signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return f"killed by signal {number}"
