"""Programs that tests start, forked from a process that has imported torch and all that they need.

An import of torch takes seconds of a processor, and the tests start hundreds of ranks, servers and
drivers. `start` replaces `subprocess.Popen`: a program of this project (`python FILE`, or
`python -m` with a module) is forked from a template, everything else is executed. The forked
process is a child of the process that asked for it, with its own arguments, environment, files,
session and signals. So a test kills it, and learns how it ended, like any other process.

pytest's own processes (`-n 4`) are forked as well, and each is the template's child with a template
of its own, so that one process imports torch for all.

A test about imports runs `python -c`, which is executed. So is a program whose environment differs
in one of `_READ_AT_IMPORT`, and all that `make check` and `make soak` start.

What a forked program cannot show: a module that it forgets to import, an order of a set that
depends on the seed of hashes, limits of the process that asked. A rank's parent is the main thread
of its driver, and not the thread that asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_TESTS = Path(__file__).parents[1]
_ROOT = _TESTS.parent
_PRELOADED = (
    "numpy",
    "torch",
    "tpengine.cli.generate",
    "tpengine.cli.serve",
    "tpengine.executor.launch.processes",
    "tpengine.executor.launch.rank_process",
    "tpengine.structured.check_program",
    "tpengine.worker.worker",
    # for the processes of pytest; not transformers, which a rank may not import
    "hypothesis",
    "openai.types",
    "pytest",
    "torch._dynamo",
)
_START_NONE = (
    ["tpengine.executor.launch.rank_process"],
    ["tpengine.executor.launch.template_process"],
    ["tpengine.structured.check_program"],
)
"""Programs that start no other one."""
_PYTEST_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How xdist starts a process for tests (`popen_bootstrapline` of execnet)."""
_ALONE = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables of a template, which must have a single thread: numpy's library starts others."""
_READ_AT_IMPORT = ("GOMP_SPINCOUNT", "LD_PRELOAD", "OMP_NUM_THREADS", "TPENGINE_CPU_ISA")
_FLAGS = ("-u", "-P")
_PATIENCE_S = 120.0
_MOST_BYTES = 1 << 17
_MOST_FILES = 64
_CLONE_PARENT, _CLONE_TID = 0x8000, 0x1200000  # linux/sched.h: CHILD_SETTID and CHILD_CLEARTID
_PR_GET_TID_ADDRESS = 40
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

_template: _Template | None = None
_read_at_import: dict[str, str | None] = {}
"""`_READ_AT_IMPORT`, as the template found them."""


class _Template:
    """This process's end of its template."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """The number of a new child of this process.

        Args:
            order: `words` after the interpreter, `cwd`, `environment`, `places` of the files, and
                `is_session`, for the leader of a new one.
            files: descriptors that it gets.
        """
        with self._lock:
            return ask(self._connection, order, files)


def ask(connection: socket.socket, order: Mapping[str, Any], files: Sequence[int]) -> int:
    """Sends an order to a template, and returns the number of the new process.

    Raises:
        OSError: the template has ended, or did not answer, and cannot be asked again.
    """
    connection.settimeout(_PATIENCE_S)
    try:
        socket.send_fds(connection, [json.dumps(order).encode()], files)
        answer = connection.recv(_MOST_BYTES)
    except BaseException:
        connection.close()  # the next caller would get a late answer
        raise
    if not answer:
        raise OSError("the template process of the tests has ended")
    return int(answer)


class _Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` whose process comes from the template if it is a program of ours."""

    def _execute_child(self, *args: Any) -> None:
        """See the standard library, which has no public place for another way to start."""
        parent: Any = super()
        asked = inspect.signature(parent._execute_child).bind(*args).arguments
        if _template is None or not _is_ours(asked):
            parent._execute_child(*args)
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [place if pipe == -1 else pipe for place, pipe in enumerate(pipes)]
        order = {
            "words": [os.fspath(word) for word in asked["args"][1:]],
            "cwd": os.fspath(asked["cwd"] or os.getcwd()),
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "places": [0, 1, 2, *asked["pass_fds"]],
            "is_session": asked["start_new_session"],
        }
        try:
            self.pid = _template.fork(order, [*files, *asked["pass_fds"]])
            self._child_created = True
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            parent._close_pipe_fds(*(asked[name] for name in ends))


def _is_ours(asked: Mapping[str, Any]) -> bool:
    """Whether a program may be forked: one of ours, and nothing is asked that a fork cannot give.

    Args:
        asked: arguments of `Popen._execute_child`.
    """
    command, environment = asked["args"], asked["env"]
    if not isinstance(command, list | tuple) or command[0] != sys.executable:
        return False
    others = ("preexec_fn", "executable", "shell", "gid", "gids", "uid")
    if any(asked[name] not in (None, False, sys.executable) for name in others):
        return False
    if (asked["umask"], asked["process_group"]) != (-1, -1):
        return False
    variables = os.environ if environment is None else environment
    if any(variables.get(name) != value for name, value in _read_at_import.items()):
        return False
    _, words = _parted([os.fspath(word) for word in command[1:]])
    if words[:1] == ["-m"]:
        path = Path(*words[1].split("."))
        files = (at / path for at in (_TESTS, _ROOT))
        return any(file.exists() or file.with_suffix(".py").exists() for file in files)
    if words == _PYTEST_WORKER:
        return True
    if not words or words[0].startswith("-"):
        return False
    script = Path(words[0]).resolve()
    return any(script.is_relative_to(folder) for folder in (_TESTS, _ROOT / "examples"))


def _parted(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The interpreter's flags that a fork can follow, and the words from `-m` or the script on."""
    count = sum(1 for _ in itertools.takewhile(_FLAGS.__contains__, words))
    return words[:count], words[count:]


def start() -> None:
    """Starts the template of this process, whose main thread must call it: the kernel ends ranks
    with the thread that has started their template."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=template_environment(),
        )
    _use(ours)


def template_environment() -> dict[str, str]:
    """The variables of a template that this process starts."""
    return {**os.environ, **_ALONE, "PYTHONPATH": f"{_TESTS}:{_ROOT}"}


def is_started() -> bool:
    """Whether this process has a template."""
    return _template is not None


def _use(connection: socket.socket) -> None:
    """From now on this process forks what it starts."""
    global _template
    _read_at_import.update({name: os.environ.get(name) for name in _READ_AT_IMPORT})
    _template = _Template(connection)
    subprocess.Popen = _Popen  # type: ignore[misc]


def fork_sibling() -> int:
    """As `os.fork`, but the child's parent is the parent of this process, which must have a single
    thread: the C library does not know of this fork. See `host.fork_sibling`."""
    python, thread = ctypes.pythonapi, ctypes.c_void_p()
    python.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(thread), 0, 0, 0)
    python.PyOS_BeforeFork()
    flags = _CLONE_PARENT | _CLONE_TID | signal.SIGCHLD
    pid = int(python.syscall(_SYS_CLONE[os.uname().machine], flags, 0, 0, thread, thread))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("the system starts no process: raise the limit of processes (ulimit -u)")
    return pid


def _serve(connection: socket.socket) -> NoReturn:
    """Forks what the other end orders, until that is closed. A child runs its program and ends."""
    while fork_for(connection, _run):
        pass
    os._exit(0)


def fork_for(
    connection: socket.socket, run: Callable[[dict[str, Any], list[int]], NoReturn]
) -> bool:
    """Waits for an order and forks a process that runs it; whether there was one.

    Args:
        run: becomes the program of an order, with these descriptors.
    """
    message, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_FILES)
    if not message:
        return False
    pid = fork_sibling()
    if pid == 0:
        connection.close()
        run(json.loads(message), files)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # the other end was killed meanwhile
        connection.send(str(pid).encode())
    return True


def _run(order: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Becomes what a fresh interpreter with these words is."""
    become(order, files)
    flags, words = _parted(order["words"])
    is_module = words[0] == "-m"
    if words[1:2] not in _START_NONE:
        _branch(order["places"])
    sys.stdout.reconfigure(write_through="-u" in flags)  # type: ignore[union-attr]
    path = [] if "-P" in flags else [os.getcwd() if is_module else str(Path(words[0]).parent)]
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv = words[is_module:]
    if words == _PYTEST_WORKER:
        exec(words[1], {"__name__": "__main__"})
    elif is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def become(order: Mapping[str, Any], files: Sequence[int]) -> None:
    """Takes the descriptors, folder and variables of an order."""
    _place(files, order["places"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["is_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115


def _place(files: Sequence[int], places: Sequence[int]) -> None:
    """Gives descriptors the numbers of these places."""
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, max(places) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(above, places, strict=True):
        os.dup2(file, place)
        os.close(file)


def _branch(files: Sequence[int]) -> None:
    """Makes a template for what this process starts, which ends with it.

    Args:
        files: descriptors that are this process's alone.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in files:
            os.dup2(nothing, file)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal
        _serve(theirs)
    theirs.close()
    _use(ours)


def preload() -> None:
    """Imports what programs need, in a process that will be a template."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal
    warnings.filterwarnings("ignore", ".*found in sys.modules.*", RuntimeWarning)  # by runpy
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy all pages
    assert len(os.listdir("/proc/self/task")) == 1, "a template must have a single thread"


if __name__ == "__main__":
    from support import forked  # the module itself, which a process of pytest asks for its template

    forked.preload()
    forked._serve(socket.socket(fileno=int(sys.argv[1])))
