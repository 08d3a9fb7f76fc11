"""What concerns the process that tpengine runs in: signals, the terminal, and facts that Linux
knows of processes.

No other file of the package installs a signal handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import resource
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from tpengine import envs
from tpengine.errors import error_number

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code that shells know of a process that SIGTERM has ended."""
START_TICKS = 19
"""Index of a process's start time in `living_fields`."""
_PARENT, _NUM_THREADS = 1, 17
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_TID_ADDRESS = 1, 15, 40  # linux/prctl.h
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
LOOPBACK = "127.0.0.1"
"""Where what is ours listens if all ranks run on one machine, so that no other one can connect."""
_MIB = 1 << 20
_BEGIN_S = 10.0
_LONGEST_POLL_S = 3600.0
Result = TypeVar("Result")
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


# Signals. Only the main thread of a process gets them, and only it can install handlers.


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Context that notes a Ctrl-C and raises KeyboardInterrupt at its end.

    A step changes scheduler, worker and outputs together; an exception in its middle would leave
    them inconsistent. A second Ctrl-C raises at once. Outside the main thread the context does
    nothing.
    """
    num_presses = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal num_presses
        num_presses += 1
        if num_presses > 1:
            raise KeyboardInterrupt

    # Replaces Python's own handler alone: a program that sets one decides for itself.
    handler = signal.default_int_handler
    if not (_is_main_thread() and signal.getsignal(signal.SIGINT) is handler):
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if num_presses:
        raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[Callable[[], bool]]:
    """Context in which SIGTERM does what Ctrl-C does, so that a step is completed and ranks are
    ended in order. Yields a function that says whether a SIGTERM has come.

    Raises:
        SystemExit: with `SIGTERM_EXIT_CODE`, in place of the KeyboardInterrupt.
    """
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(number, frame)
        else:  # a shell's background job ignores Ctrl-C, but must end on SIGTERM
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: has_come
    except KeyboardInterrupt:
        if has_come:
            raise SystemExit(SIGTERM_EXIT_CODE) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_end_at_once(last_words: str) -> Iterator[None]:
    """Context in which SIGTERM and Ctrl-C end the process immediately, with the exit code that
    shells know.

    For imports, and for work that needs no clean-up. Some modules swallow an exception that a
    signal raises while they are imported, and stay half initialised.

    Args:
        last_words: a line for standard error.
    """

    def end(number: int, frame: FrameType | None) -> None:
        try:  # writes to the file itself: `print` could raise inside another `print`
            os.write(2, f"{last_words}\n".encode())
        finally:
            os._exit(128 + number)

    with kept_end_handlers():
        signal.signal(signal.SIGTERM, end)
        # A shell's background job ignores Ctrl-C, or a program handles it.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, end)
        yield


@contextlib.contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """Context that puts the program's own SIGTERM handler back at its end.

    For libraries that replace it. A program without one keeps what the library has installed.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if _is_main_thread() and handler not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, handler)


_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def kept_end_handlers() -> Iterator[None]:
    """Context that puts the handlers of the signals that end a process back at its end.

    For event loops: uvloop leaves the handlers of a closed loop, which drop every signal.
    """
    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not installed from Python
                signal.signal(number, handler)


class EndSignals(threading.Thread):
    """Passes on SIGTERM, SIGINT and SIGHUP, by a thread of its own: if something holds the main
    thread up, Python runs no handler and an event loop no callback. An ignored SIGHUP, as under
    nohup, stays so.

    Args:
        callback: gets the number of each signal; returns seconds until `late` at the latest.
        late: ends the process, whose number of a signal it gets.
    """

    def __init__(self, callback: Callable[[int], float], late: Callable[[int], NoReturn]) -> None:
        super().__init__(name="tpengine-signals", daemon=True)
        self._callback, self._late = callback, late
        self._source, self._sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.start()

    def catch(self) -> None:
        """Installs the handlers, in the main thread; again after others have replaced them."""
        for number in _END_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        # Python's own handler in C writes each signal's number there, whatever the threads do.
        signal.set_wakeup_fd(self._sink, warn_on_full_buffer=False)

    def run(self) -> None:
        poll, end, number = select.poll(), math.inf, 0
        poll.register(self._source, select.POLLIN)
        while (left_s := end - time.monotonic()) > 0:
            ready = poll.poll(1e3 * min(left_s, _LONGEST_POLL_S))  # at most 24 days fit
            if ready and (sent := os.read(self._source, 1)[0]) in _END_SIGNALS:
                number = sent
                end = min(end, time.monotonic() + self._callback(number))
        self._late(number)


def allow_open_files(count: int) -> int:
    """Lets this process open `count` files and connections, or as many as it may; returns how many
    of these it may open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def bound_resource(kind: int, value: int, is_final: bool = False) -> None:
    """Sets a limit of this process, unless the system's own is lower.

    Args:
        kind: one of `resource.RLIMIT_...`.
        is_final: the process cannot raise it again.
    """
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value if is_final else hard))


def own_memory_bytes() -> tuple[int, int]:
    """Bytes of this process's address space, and those of them that are in memory."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Begin(threading.Event):
    """Set by a thread that begins; the thread that starts it waits for that."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGIN_S):
            why = f"a new thread did not begin within {_BEGIN_S:g} s: memory is short"
            raise RuntimeError(why) from MemoryError("for the first lines of a thread")
        return True


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread while the program runs. `Thread.start` waits until the thread begins, without
    a bound, and one that finds no memory for its first lines never does.

    Raises:
        RuntimeError: it has not begun in time, or the system has no thread left.
    """
    vars(thread)["_started"] = _Begin()
    thread.start()


def run_in_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Runs `work` in a new thread. If no thread can be started, the result is that error. The
    thread is a daemon, so that a process can end before the work has."""
    result = Future[Result]()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    try:
        start_thread(threading.Thread(target=run, name=name, daemon=True))
    except (RuntimeError, MemoryError) as error:
        result.set_exception(error)
    return result


# The terminal.


def print_note(text: str) -> None:
    """Prints a remark that is no part of a command's output: dim at a terminal."""
    dim, normal = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{normal}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def streamed_text() -> Iterator[Callable[[str], None]]:
    """Yields a function that prints text immediately, for text that grows while it is generated.

    An exception, Ctrl-C included, ends the current line first, so that no error message and no
    shell prompt appears in the middle of it.
    """
    is_in_line = False

    def write(text: str) -> None:
        nonlocal is_in_line
        if text:  # before the print: Ctrl-C may come during it
            is_in_line = not text.endswith("\n")
        print(text, end="", flush=True)

    try:
        yield write
    except BaseException:
        if is_in_line:
            with contextlib.suppress(OSError):  # the reader of a pipe may have gone
                print(flush=True)
        raise


# Processes.


def living_fields(pid: int) -> list[str] | None:
    """Returns the fields of `/proc/<pid>/stat` from the process state on; None: no such process.

    A process that has ended counts as gone although its parent has not waited for it: its memory
    and its files are free. It counts as living while other threads of it still end, since they
    may hold both.

    Raises:
        OSError: this process has no file descriptor left to look.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold any character
    if fields[0] in "ZX" and int(fields[_NUM_THREADS]) <= 1:
        return None
    return fields


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None: no such process."""
    fields = living_fields(pid)
    return None if fields is None else int(fields[START_TICKS])


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped this process."""
    fields = living_fields(pid)
    return fields is not None and fields[0] in "Tt"


def parent_of(pid: int) -> tuple[int, int] | None:
    """The process that started this one: its number, and its start in clock ticks since boot;
    None: one of them has ended."""
    fields = living_fields(pid)
    parent = None if fields is None else int(fields[_PARENT])
    ticks = None if parent is None else start_ticks(parent)
    return None if parent is None or ticks is None else (parent, ticks)


def end_with_parent(parent: int, name: str) -> None:
    """Has the kernel kill this process, also while it is stopped, when the thread of the parent
    ends that started it.

    Args:
        parent: the parent's number, to notice that it has ended already.
        name: of this process in lists of processes; 15 letters of it are shown.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
        os._exit(1)


def fork_sibling() -> int:
    """As `os.fork`, but the new process is a child of this process's parent, which learns how it
    ends, and with which it ends if it asks for that (`end_with_parent`).

    This process must have a single thread. The C library does not know of the fork, which does what
    its own `fork` does for a process without others: it renews the number that the library keeps of
    the thread.

    Raises:
        OSError: the system starts no process, or does not know this way.
    """
    python = ctypes.PyDLL(None, use_errno=True)
    thread, number = ctypes.c_void_p(), _SYS_CLONE.get(os.uname().machine)
    if number is None or python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread), 0, 0, 0) != 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    python.syscall.argtypes = [ctypes.c_long] * 4 + [ctypes.c_void_p] * 2
    python.PyOS_BeforeFork()
    # The last two are the thread's storage, which is unused, and its number, in either order.
    pid = int(python.syscall(number, flags, 0, 0, thread, thread))
    failure = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(failure, os.strerror(failure))
    return pid


def describe_resources(error: BaseException) -> str:
    """What a start of processes may lack on this machine, for the report of one that failed.

    Args:
        error: the failure; it or a cause of it may hold the system's error number.
    """
    parts, ray = [], envs.ray_folders()[0]
    for folder in (ray if ray.is_dir() else ray.parent, Path("/dev/shm")):
        with contextlib.suppress(OSError):
            facts = os.statvfs(folder)
            free, total = (n * facts.f_frsize / _MIB for n in (facts.f_bavail, facts.f_blocks))
            parts.append(f"{free:.0f} of {total:.0f} MiB free in {folder}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        parts.append(f"{len(os.listdir('/proc/self/fd'))} of {limit} file descriptors open")
    except OSError as failure:  # the list itself needs one
        parts.append(f"its limit is {limit} file descriptors ({failure.strerror})")
    if number := error_number(error):
        parts.append(f"errno {number} ({os.strerror(number)})")
    return ", ".join(parts)


class FileReserve:
    """Descriptors that are held, so that there are some when they are needed.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []

    def hold(self) -> None:
        """Takes as many as are missing, or as there are."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def give_back(self) -> None:
        """Closes them; any thread of this process may take them."""
        while self._held:
            os.close(self._held.pop())


def open_unlinked(path: str, flags: int) -> int:
    """For `open`: fails at a symbolic link, which another user may have put into a shared folder,
    and does not wait at a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_trusted(path: Path) -> str:
    """Reads a file in a folder where other users may write.

    Raises:
        OSError: there is no such file, it is a link, or it belongs to another user than this one
            and root, or others may write it.
    """
    with open(path, opener=open_unlinked) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise PermissionError(f"{path} is no file")
        check_trusted(path, facts)
        return file.read()


def check_trusted(path: Path, facts: os.stat_result) -> None:
    """Raises PermissionError if a file or folder belongs to another user than this one and root, or
    others may write it."""
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {facts.st_uid}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} may be written by others (mode {facts.st_mode:o})")


def close_to_others(path: Path) -> None:
    """Lets no other user read or enter a file or folder of this user's. Any other is left alone."""
    with contextlib.suppress(OSError):
        fd = open_unlinked(str(path), os.O_RDONLY)
        try:
            facts = os.fstat(fd)
            if facts.st_uid == os.geteuid():
                os.fchmod(fd, stat.S_IMODE(facts.st_mode) & stat.S_IRWXU)
        finally:
            os.close(fd)
