"""Ranks as subprocesses of the driver, on its own machine; without Ray.

A rank inherits its ends of two socket pairs, so that nothing listens and no other process can
connect: for steps and calls, and for heartbeats. Its output is a pipe, which the driver copies to
its own standard error. No rank outlives the driver: the kernel kills it, also when it is stopped.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpengine import envs, host
from tpengine.config import EngineConfig
from tpengine.errors import ConfigError, PlacementError, counted
from tpengine.executor.channel import Channel, ChannelError, FrameKind
from tpengine.executor.codec import encode_call
from tpengine.executor.diagnosis import ANSWER_S, STOPPED, RankPlace
from tpengine.executor.home import Home, Started
from tpengine.executor.launch import node_agent, rank_process
from tpengine.executor.spares import Spares
from tpengine.logger import STDERR, init_logger, write_line

logger = init_logger(__name__)

_START_S = 30.0
"""Longest wait for the thread that starts processes."""
_REAP_S = 5.0
"""Longest wait for a process to end after it has closed its socket, and for its last output."""
_LOG_LINES = 60
_PROGRAM = rank_process.__name__
Process = subprocess.Popen[str]


class Starter(threading.Thread):
    """The thread that starts all processes of an executor. The kernel ends a process when the
    thread ends that started it, and threads that rebuild a group do not live long.

    Args:
        program: module that each process runs.
    """

    def __init__(self, program: str) -> None:
        super().__init__(name="tpengine-starter", daemon=True)
        self._program = program
        self._orders: queue.SimpleQueue[tuple[Sequence[socket.socket], Future[Process]] | None]
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

    def start_process(self, ends: Sequence[socket.socket]) -> Process:
        """Starts a process that inherits these ends, which are the thread's from now on: it closes
        them once the process has them, however long the system takes.

        Raises:
            OSError: the system does not start it.
        """
        process: Future[Process] = Future()
        self._orders.put((ends, process))
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
        process = started.result()
        process.kill()
        process.communicate(timeout=_REAP_S)


class RankProcess:
    """The driver's side of one rank's process, which may be a spare; see `spares.Spare`.

    Attributes:
        name: before each line of its output.
        place: where it is; the driver reads its log from a pipe, and finds it by the process.
        channels: for steps and for heartbeats.

    Raises:
        PlacementError: no descriptor, process or thread is left.
    """

    node_id = ""

    def __init__(self, starter: Starter) -> None:
        self.name = "spare"
        self.channels: list[Channel] = []
        self._is_prepared = False
        self._lines: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._copier = threading.Thread(target=self._copy, name="tpengine-log", daemon=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_channels)  # frames of the error would keep them open
            try:
                self._process = starter.start_process(self._open_channels())
                undo.callback(self._process.kill)
                self.pid = self._process.pid
                name, ticks = socket.gethostname(), host.start_ticks(self.pid) or 0
                self.place = RankPlace("", host.LOOPBACK, name, (), self.pid, ticks, str(self.pid))
                host.start_thread(self._copier)
            except (OSError, RuntimeError) as error:
                raise PlacementError(
                    f"no process for a rank can be started: {error}; free memory, or raise the "
                    "limits of processes and open files (ulimit -u, ulimit -n)"
                ) from error
            undo.pop_all()

    def _open_channels(self) -> list[socket.socket]:
        """Opens both channels; returns the process's ends of them."""
        ends = []
        with contextlib.ExitStack() as undo:
            for _ in range(2):
                own, end = socket.socketpair()
                undo.callback(end.close)
                self.channels.append(Channel(own))
                ends.append(end)
            undo.pop_all()
        return ends

    def _copy(self) -> None:
        """Runs in a thread: copies the output to standard error until its end. Not by `sys.stderr`:
        the interpreter must not end while this thread holds its lock."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                write_line(STDERR, f"({self.name}) {line}".rstrip("\n"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def last_lines(self) -> str:
        """The end of its output."""
        if self._process.poll() is not None:
            self._copier.join(_REAP_S)
        return "".join(self._lines).strip()

    def exit_status(self) -> int | None:
        """Its wait status; None: it has not ended."""
        code = self._process.poll()  # None also while `_copy` collects the status
        if code is None and not node_agent.NodeAgent.state(self.place.process):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_REAP_S)
        if code is None:
            return None
        return -code if code < 0 else code << 8

    def prepare(self, model_code: Sequence[str | None]) -> None:
        """Has a spare import everything."""
        call = encode_call(("import_all", (model_code,), {}))
        self.channels[0].send(FrameKind.CALL, 0, call, _START_S)

    def is_prepared(self) -> bool:
        try:
            self._is_prepared = self._is_prepared or self.channels[0].take() is not None
        except ChannelError:  # it has ended, as `answer` says
            self._is_prepared = True
        return self._is_prepared

    def answer(self) -> RankPlace | None:
        state = node_agent.NodeAgent.state(self.place.process)
        return None if state in STOPPED else self.place

    def end(self) -> None:
        self._process.kill()
        self._close_channels()

    def _close_channels(self) -> None:
        for channel in self.channels:
            channel.close()


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


@dataclass(frozen=True)
class ProcessLauncher:
    """The processes of one group; see `home.Launcher`. The i-th becomes rank i.

    Args:
        devices: GPUs of each rank; empty: the same as the driver.
    """

    agents: OwnMachine
    _processes: Sequence[RankProcess]
    _devices: Sequence[tuple[str, ...]]

    def start(self, epoch: int, timeout_s: float, check: Callable[[], None]) -> list[Started]:
        each = zip(self._processes, self._devices, strict=True)
        return [(replace(child.place, devices=gpus), child.channels) for child, gpus in each]

    def kill(self) -> None:
        for process in self._processes:
            process.end()


class ProcessHome(Home):
    """This machine: each rank is a subprocess of the driver.

    Args:
        devices: of each rank; None: the i-th visible GPU for rank i.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """

    def __init__(
        self, config: EngineConfig, devices: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        ranks, self._size = config.parallel.ranks, config.parallel.world_size
        assert ranks is not None, "ranks in processes of their own need config.parallel.ranks"
        self._model_code = config.model_code
        self._devices = devices or rank_devices(config.device, self._size)
        self._agents = OwnMachine()
        self._starter = Starter(_PROGRAM)
        self.spares = Spares(ranks.spare_workers, self._start_spare)

    def _start_spare(self, _: str) -> RankProcess:
        spare = RankProcess(self._starter)
        spare.prepare(self._model_code)
        return spare

    def make_launcher(self) -> ProcessLauncher:
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
        self._agents.children = {process.pid: process for process in processes}
        return ProcessLauncher(self._agents, processes, self._devices)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._starter.stop)
            stack.callback(self._agents.close)
            stack.callback(self.spares.close)


def detect_device(wanted: str) -> str:
    """Settles `auto`: cuda where this machine has a GPU that torch can use, else cpu.

    Raises:
        ConfigError: cuda was asked for, but torch cannot use it.
    """
    if wanted == "cpu" or (wanted == "auto" and not any(Path("/dev").glob("nvidia[0-9]*"))):
        return "cpu"
    from tpengine.worker import device  # imports torch, which takes seconds

    return device.detect_device(wanted)


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
            f"{size} ranks need a GPU each, and this machine shows {counted(count, 'GPU')}; lower "
            "tensor_parallel_size or pipeline_parallel_size, or run the ranks on several machines "
            "with executor='ray'"
        )
    return [(str(rank) if names is None else names[rank],) for rank in range(size)]
