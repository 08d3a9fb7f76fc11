"""Processes that the driver has as children on its own machine, and what they print.

The kernel ends each of them, also one that is stopped, when the driver ends. `Starter` starts an
interpreter; a template (`template.py`) forks one that has imported everything.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import IO

from tpengine import envs, host
from tpengine.executor.diagnosis import STOPPED, RankPlace
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.logger import STDERR, write_line

_START_S = 30.0
"""Longest wait for the thread that starts processes."""
REAP_S = 5.0
"""Longest wait for a process to end after it was killed or has closed its socket, and for its last
output."""
_LOOK_S = 0.005
_LOG_LINES = 60


End = socket.socket | IO[bytes]
"""What a process inherits."""


class ForkedProcess:
    """A child of this process that another one has forked. Has what is used of `subprocess.Popen`.

    Args:
        output: descriptor of a pipe that it writes to; belongs to this object from now on.
    """

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = open(output, errors="replace")  # noqa: SIM115 (until its end)
        self._code: int | None = None
        self._lock = threading.Lock()  # its number may be another process's once it was reaped

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None: it has not ended."""
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # the program has reaped it; `Popen` says so, too
                    self._code = 0
                else:
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float) -> int:
        """Waits for its end; returns its exit code. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return code

    def kill(self) -> None:
        """Sends SIGKILL, if it has not ended."""
        with self._lock:
            if self._code is None:
                os.kill(self.pid, signal.SIGKILL)


Process = subprocess.Popen[str] | ForkedProcess

_Order = tuple[str, Sequence[End], dict[str, str], Future[Process]]
"""Program, ends of sockets that it inherits, variables, and where the process is put."""


class Starter(threading.Thread):
    """The thread that starts all interpreters of an executor. The kernel ends a process when the
    thread ends that started it, or that started its template, and threads that rebuild a group do
    not live long."""

    def __init__(self) -> None:
        super().__init__(name="tpengine-starter", daemon=True)
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (order := self._orders.get()) is not None:
            program, ends, variables, process = order
            try:
                if process.set_running_or_notify_cancel():
                    files = [end.fileno() for end in ends]
                    process.set_result(self._start(program, files, variables))
            except BaseException as error:  # all processes would end with this thread
                process.set_exception(error)
            finally:
                for end in ends:
                    end.close()

    def _start(self, program: str, files: list[int], variables: dict[str, str]) -> Process:
        # -P: the folder that the driver runs in is searched only if it is in the driver's own path
        command = [sys.executable, "-u", "-P", "-m", program, str(os.getpid())]
        return subprocess.Popen(
            [*command, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=envs.for_children() | variables,
            pass_fds=files,
            start_new_session=True,  # a Ctrl-C at the terminal is the driver's alone
        )

    def start_process(
        self, program: str, ends: Sequence[End], variables: dict[str, str] | None = None
    ) -> Process:
        """Starts a process.

        Args:
            program: module that it runs, with this process's number and the descriptors as
                arguments.
            ends: that it inherits. They are the thread's from now on: it closes them once the
                process has them, however long the system takes.
            variables: of its environment, beside those of a rank.

        Raises:
            OSError: the system does not start it.
        """
        process: Future[Process] = Future()
        self._orders.put((program, ends, variables or {}, process))
        try:
            return process.result(_START_S)
        except BaseException as error:
            if not process.cancel():
                process.add_done_callback(_end_late)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"the system takes longer than {_START_S:g} s") from error
            raise

    def stop(self) -> None:
        """Ends the thread, and all processes that it has started and that are still there."""
        self._orders.put(None)


def _end_late(started: Future[Process]) -> None:
    """Ends a process that was started after its caller had stopped waiting. Does nothing if the
    start failed."""
    if started.exception() is None:
        end_process(started.result())


def end_process(process: Process) -> None:
    """Kills a process whose output no thread copies, and reaps it.

    Raises:
        subprocess.TimeoutExpired: it does not end in time.
    """
    process.kill()
    process.wait(REAP_S)
    if process.stdout is not None:
        process.stdout.close()


class Child:
    """A child of the driver, whose output a thread copies to the driver's standard error.

    Args:
        name: before each line of its output.
        process: just started; killed if this cannot be constructed.

    Attributes:
        place: where it is; the driver reads its log from a pipe, and finds it by the process.

    Raises:
        RuntimeError: there is no thread for its output.
    """

    node_id = ""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.pid = name, process.pid
        self._process = process
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        ticks = host.start_ticks(self.pid) or 0
        machine = "", host.LOOPBACK, socket.gethostname()
        self.place = RankPlace(*machine, (), self.pid, ticks, str(self.pid))
        self._copier = threading.Thread(target=self._copy, name="tpengine-log", daemon=True)
        try:
            host.start_thread(self._copier)
        except BaseException:
            end_process(process)
            raise

    def _copy(self) -> None:
        """Runs in a thread: copies the output to standard error until its end. Not by `sys.stderr`:
        the interpreter must not end while this thread holds its lock."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                write_line(STDERR, f"({self.name}) {line}".rstrip("\n"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)

    def last_lines(self) -> str:
        """The end of its output."""
        if self._process.poll() is not None:
            self._copier.join(REAP_S)
        return "".join(self._lines).strip()

    def exit_status(self) -> int | None:
        """Its wait status; None: it has not ended."""
        code = self._process.poll()  # None also while `_copy` collects the status
        if code is None and not NodeAgent.state(self.place.process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(REAP_S)
        if code is None:
            return None
        return -code if code < 0 else code << 8

    def answer(self) -> RankPlace | None:
        """Where it is; None: it has ended, or is stopped."""
        return None if NodeAgent.state(self.place.process) in STOPPED else self.place

    def end(self) -> None:
        """Kills it, also if it is stopped; does not wait."""
        self._process.kill()
