"""Ranks as subprocesses of the driver, on its own machine; without Ray.

A rank inherits its ends of three socket pairs, so that nothing listens and no other process can
connect: for calls, for steps and for heartbeats. Its output is a pipe, which the driver copies to
its own standard error. No rank outlives the driver: the kernel kills it, also when it is stopped.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Protocol

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.errors import ConfigError, PlacementError, counted
from tpengine.executor.channel import ChannelClosedError, InheritedChannels
from tpengine.executor.diagnosis import ANSWER_S, RankPlace
from tpengine.executor.group import Group
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch import node_agent, rank_process
from tpengine.executor.spares import SPARE_ANSWER_S, Spares
from tpengine.logger import init_logger

logger = init_logger(__name__)

_START_S = 30.0
"""Longest wait for the thread that starts processes."""
_REAP_S = 5.0
"""Longest wait for a process to end after it has closed its socket, and for its last output."""
_LOG_LINES = 60
_PROGRAM = rank_process.__name__
Process = subprocess.Popen[str]


class End(Protocol):
    """Of a socket."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Starter(threading.Thread):
    """The thread that starts all processes of an executor. The kernel ends a process when the
    thread ends that started it, and threads that rebuild a group do not live long.

    Args:
        program: module that each process runs.
    """

    def __init__(self, program: str) -> None:
        super().__init__(name="tpengine-starter", daemon=True)
        self._program = program
        self._orders: queue.SimpleQueue[tuple[Sequence[End], Future[Process]] | None]
        self._orders = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (order := self._orders.get()) is not None:
            ends, process = order
            try:
                if process.set_running_or_notify_cancel():
                    process.set_result(self._start([end.fileno() for end in ends]))
            except BaseException as error:  # all processes would end with this thread
                process.set_exception(error)
            finally:
                for end in ends:
                    end.close()

    def _start(self, files: list[int]) -> Process:
        # -P: the folder that the driver runs in is searched only if it is in the driver's own path
        command = [sys.executable, "-u", "-P", "-m", self._program, str(os.getpid())]
        return subprocess.Popen(
            [*command, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=envs.for_children(),
            pass_fds=files,
            start_new_session=True,  # a Ctrl-C at the terminal is the driver's alone
        )

    def start_process(self, ends: Sequence[End]) -> Process:
        """Starts a process that inherits these ends, which are the thread's from now on: it closes
        them once the process has them, however long the system takes.

        Raises:
            PlacementError: the system does not start it.
        """
        process: Future[Process] = Future()
        self._orders.put((ends, process))
        try:
            return process.result(_START_S)
        except BaseException as error:
            if not process.cancel():
                process.add_done_callback(_end_late)
            if isinstance(error, TimeoutError):
                error = TimeoutError(f"the system takes longer than {_START_S:g} s")
            if isinstance(error, OSError):
                raise _not_started(error) from error
            raise

    def stop(self) -> None:
        """Ends the thread, and all processes that it has started and that are still there."""
        self._orders.put(None)


def _end_late(started: Future[Process]) -> None:
    """Ends a process that was started after its caller had stopped waiting. Does nothing if the
    start failed."""
    if started.exception() is None:
        process = started.result()
        process.kill()
        process.communicate(timeout=_REAP_S)


def _not_started(error: Exception) -> PlacementError:
    return PlacementError(
        f"no process for a rank can be started: {error}; free memory, or raise the limits of "
        "processes and open files (ulimit -u, ulimit -n)"
    )


class RankProcess:
    """The driver's side of one rank's process, which may be a spare; see `spares.Spare`.

    Attributes:
        name: before each line of its output.
        sockets: this side's ends, for steps and for heartbeats.
    """

    node_id = ""

    def __init__(self, starter: Starter) -> None:
        self.name = "spare"
        try:
            self._calls, calls = Pipe()
            pairs = [socket.socketpair() for _ in range(2)]
        except OSError as error:
            raise _not_started(error) from error
        self.sockets = [pair[0] for pair in pairs]
        self._process = starter.start_process([calls, *(pair[1] for pair in pairs)])
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, Callable[[Any], None]] = {}
        self._is_gone = False
        self._prepared: Calls | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._copier = threading.Thread(target=self._copy, name="tpengine-log", daemon=True)
        hearer = threading.Thread(target=self._hear, name="tpengine-calls", daemon=True)
        try:
            self._copier.start()
            hearer.start()
        except BaseException as error:
            self._process.kill()
            if isinstance(error, RuntimeError):  # no thread is left
                raise _not_started(error) from error
            raise

    def call(
        self, on_answer: Callable[[Any], None], method: str, *args: Any, **kwargs: Any
    ) -> None:
        """Has the rank run a method. `on_answer` is called in another thread, once, with the answer
        or a `ChannelClosedError`."""
        with self._lock:
            if not self._is_gone:
                number = next(self._numbers)
                self._answers[number] = on_answer
                with contextlib.suppress(OSError):  # it has ended; `_hear` answers
                    self._calls.send((number, method, args, kwargs))
                return
        on_answer(self._end())

    def _hear(self) -> None:
        """Runs in a thread until the process has ended, and reaps it."""
        try:
            while True:
                number, answer = self._calls.recv()
                with self._lock:
                    on_answer = self._answers.pop(number)
                on_answer(answer)
        except (EOFError, OSError):  # it has ended
            pass
        except Exception:  # an answer that cannot be read; without its answers it is of no use
            logger.exception("what %s has answered cannot be read; it is ended", self.name)
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        with self._lock:
            self._is_gone = True
            missing = list(self._answers.values())
            self._answers.clear()
        for on_answer in missing:
            on_answer(self._end())
        self._calls.close()

    def _end(self) -> ChannelClosedError:
        return ChannelClosedError(f"process {self.pid} has closed its end")

    def _copy(self) -> None:
        """Runs in a thread: copies the output to standard error until its end. Not by `sys.stderr`:
        the interpreter must not end while this thread holds its lock."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                with contextlib.suppress(OSError):  # it may be closed
                    os.write(2, f"({self.name}) {line}".encode())

    def last_lines(self) -> str:
        """The end of its output."""
        if self._process.poll() is not None:
            self._copier.join(_REAP_S)
        return "".join(self._lines).strip()

    def exit_status(self) -> int | None:
        """Its wait status; None: it has not ended."""
        code = self._process.poll()
        if code is None:
            return None
        return -code if code < 0 else code << 8

    def prepare(self, model_impl: str) -> None:
        """Has a spare import everything."""
        self._prepared = Calls.of({0: self}, "import_all", {0: (model_impl,)}, {})

    def is_prepared(self) -> bool:
        return self._prepared is not None and self._prepared.are_complete()

    def answer(self) -> RankPlace | None:
        place = Calls.of({0: self}, "describe", {0: ()}, {}).wait(SPARE_ANSWER_S).get(0)
        return place if isinstance(place, RankPlace) else None

    def end(self) -> None:
        self._process.kill()


class Calls:
    """See `group.Calls`.

    Args:
        count: how many answers there will be.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    @classmethod
    def of(
        cls,
        processes: Mapping[int, RankProcess],
        method: str,
        args: Mapping[int, tuple[Any, ...]],
        kwargs: Mapping[str, Any],
    ) -> Calls:
        """Calls a method of those processes that `args` names."""
        calls = cls(len(args))
        for rank, own in args.items():
            processes[rank].call(partial(calls._put, rank), method, *own, **kwargs)
        return calls

    def _put(self, rank: int, answer: Any) -> None:
        self._answers.put((rank, answer))

    def are_complete(self) -> bool:
        """Whether all answers are there, before the first `wait`."""
        return self._answers.qsize() == self._count

    def wait(self, timeout_s: float) -> dict[int, Any]:
        found: dict[int, Any] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                rank, answer = self._answers.get(timeout=0.0 if found else timeout_s)
                found[rank] = answer
        return found


class OwnMachine(node_agent.NodeAgent):
    """The agents of the only machine; see `diagnosis.NodeAgents`. It knows how its children ended,
    and what they printed.

    Attributes:
        children: processes of ranks, by number; the latest group's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.children: dict[int, RankProcess] = {}

    def open(self, node_ids: Iterable[str]) -> None:
        """Does nothing: the driver itself acts."""

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        return getattr(self, method)(*args)

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        getattr(self, method)(*args)

    def is_starting(self, node_id: str) -> bool:
        return False

    def _status(self, process: node_agent.Process, file: int) -> int | None:
        child = self.children.get(process[0])
        return super()._status(process, file) if child is None else child.exit_status()

    def tail(self, path: str) -> str:
        child = self.children.get(int(path))
        return "" if child is None else child.last_lines()


class ProcessLauncher:
    """The processes of one group; see `group.Launcher`. The i-th becomes rank i.

    Args:
        devices: of each rank.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        devices: Sequence[tuple[str, ...]],
        agents: OwnMachine,
    ) -> None:
        self.agents = agents
        self._processes = dict(enumerate(processes))
        self._devices = devices
        agents.children = {process.pid: process for process in processes}

    def start(self) -> Calls:
        args = {rank: (devices,) for rank, devices in enumerate(self._devices)}
        return Calls.of(self._processes, "describe", args, {})

    def order(self, places: Sequence[RankPlace]) -> list[RankPlace]:
        return list(places)

    def listen(self, epoch: int) -> InheritedChannels:
        return InheritedChannels([process.sockets for process in self._processes.values()], epoch)

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], kwargs: Mapping[str, Any]
    ) -> Calls:
        return Calls.of(self._processes, method, args, kwargs)

    def kill(self) -> None:
        for process in self._processes.values():
            process.end()


class ProcessExecutor(GroupExecutor):
    """One subprocess per rank.

    Args:
        devices: of each rank; None: the i-th visible GPU for rank i.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """

    def __init__(
        self, config: EngineConfig, devices: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        super().__init__(config)
        self._size = config.parallel.tensor_parallel_size
        self._devices = devices or rank_devices(config.device, self._size)
        self._agents = OwnMachine()
        self._starter = Starter(_PROGRAM)
        self.spares = Spares(self._limits.spare_workers, self._start_spare)

    @staticmethod
    def detect_device(wanted: str) -> str:
        """Settles `auto`: cuda where this machine has a GPU that torch can use, else cpu.

        Raises:
            ConfigError: cuda was asked for, but torch cannot use it.
        """
        if wanted == "cpu" or (wanted == "auto" and not any(Path("/dev").glob("nvidia[0-9]*"))):
            return "cpu"
        from tpengine.worker.device import detect_device  # imports torch, which takes seconds

        return detect_device(wanted)

    def _start_spare(self, _: str) -> RankProcess:
        spare = RankProcess(self._starter)
        spare.prepare(self._config.model.model_impl)
        return spare

    def _place(self) -> None:
        """Does nothing: every rank runs here."""

    def _replace(self, lost: Group) -> None:
        self._end_lost(lost)

    def _make_launcher(self) -> ProcessLauncher:
        spares = self.spares.take([RankProcess.node_id] * self._size)
        processes = [spare for spare in spares if isinstance(spare, RankProcess)]
        try:
            while len(processes) < self._size:
                processes.append(RankProcess(self._starter))
        except BaseException:
            for process in processes:
                process.end()
            raise
        for rank, process in enumerate(processes):
            process.name = f"rank {rank}"
        return ProcessLauncher(processes, self._devices, self._agents)

    def _give_places_back(self) -> None:
        """Does nothing."""

    def _close(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self._starter.stop)
        stack.callback(self._agents.close)
        stack.callback(self.spares.close)


def rank_devices(device: str, size: int) -> list[tuple[str, ...]]:
    """The GPU of each rank, the i-th visible one for rank i; empty on CPU.

    Raises:
        ConfigError: there are fewer than ranks.
    """
    if device == "cpu":
        return [()] * size
    from tpengine.worker.device import count_gpus  # imports torch, which takes seconds

    count, names = count_gpus(), envs.visible_gpus()
    if count < size:
        raise ConfigError(
            f"tensor_parallel_size = {size} needs a GPU for each rank, and this machine shows "
            f"{counted(count, 'GPU')}; lower it, or run the ranks on several machines with "
            "executor='ray'"
        )
    return [(str(rank) if names is None else names[rank],) for rank in range(size)]
