"""Ranks as children of the driver, on its own machine; without Ray.

They are forked from a template that has imported all they need; while there is none, each is an
interpreter of its own, whose imports take seconds. A rank inherits its ends of two socket pairs, so
that nothing listens and no other process can connect: for steps and calls, and for heartbeats. No
rank outlives the driver: the kernel kills it, also when it is stopped.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.errors import ConfigError, PlacementError, counted
from tpengine.executor.channel import Channel, Check
from tpengine.executor.diagnosis import ANSWER_S
from tpengine.executor.home import Home, Lost, Start, Started, keeps_memory
from tpengine.executor.launch import node_agent, rank_process
from tpengine.executor.launch.children import Child, End, Process, Starter
from tpengine.executor.launch.template import Template
from tpengine.executor.spares import Spares
from tpengine.logger import init_logger

logger = init_logger(__name__)

_LOOK_S = 0.01
"""Between two looks at a template that imports."""
_RENEW_S = 3.0
"""Until a template that has ended is replaced."""
_PROGRAM = rank_process.__name__


class RankProcess(Child):
    """The driver's side of one rank's process.

    Args:
        start: starts the process, which inherits these ends.

    Attributes:
        channels: for steps and for heartbeats.

    Raises:
        PlacementError: no descriptor, process or thread is left.
    """

    def __init__(self, name: str, start: Callable[[Sequence[End]], Process]) -> None:
        self.channels: list[Channel] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_channels)  # frames of the error would keep them open
            try:
                super().__init__(name, start(self._open_ends()))
            except (OSError, RuntimeError) as error:
                raise PlacementError(
                    f"no process for a rank can be started: {error}; free memory, or raise the "
                    "limits of processes and open files (ulimit -u, ulimit -n)"
                ) from error
            undo.pop_all()

    def _open_ends(self) -> list[End]:
        """Opens both channels; returns what the process inherits."""
        ends: list[End] = []
        with contextlib.ExitStack() as undo:
            for _ in range(2):
                own, end = socket.socketpair()
                undo.callback(end.close)
                self.channels.append(Channel(own))
                ends.append(end)
            undo.pop_all()
        return ends

    def end(self) -> None:
        """Kills it, also if it is stopped, and closes its channels; does not wait."""
        super().end()
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


class ProcessHome(Home):
    """This machine: each rank is a child of the driver.

    Its `spares` hold the template.

    Args:
        devices: GPUs of each rank, empty: the same as the driver; None: the i-th visible GPU for
            rank i.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """

    agents: OwnMachine

    def __init__(
        self, config: EngineConfig, devices: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        self._size = config.parallel.world_size
        if config.parallel.own_processes.spare_workers:
            logger.info("no spare workers: ranks are forked from a template process")
        self._model_code = config.model_code
        self._devices = devices or rank_devices(config.device, self._size)
        self.agents = OwnMachine()
        self._starter = Starter()
        self.keeps_memory = keeps_memory(config)
        self._ranks: list[RankProcess] = []  # of the latest group
        self.spares: Spares[Template] = Spares(1, self._start_template)
        self.spares.start_missing([Template.node_id])  # it imports while the driver reads its files

    def place(self, start: Start) -> None:
        """Waits for the template, which imports once for all ranks."""
        deadline = time.monotonic() + start.appear_s
        with start.phase("template"):
            self.spares.start_missing([Template.node_id])
            while not all(template.is_prepared() for template in self.spares.usable()):
                if time.monotonic() > deadline:
                    break
                start.check()
                time.sleep(_LOOK_S)

    def has_room(self, num_more: int, check: Check) -> bool:
        """Starts as many processes, and ends them."""
        if self._size + num_more > len(self._devices):
            return False
        with contextlib.ExitStack() as undo, contextlib.suppress(PlacementError):
            for _ in range(num_more):
                check()
                undo.callback(RankProcess("look for room", self._start_rank).end)
            return True
        return False

    def replace(self, size: int, lost: Lost, start: Start) -> None:
        """See `Home`. A home that takes over from another one waits for its template, too."""
        super().replace(size, lost, start)
        if size > len(self._devices):
            raise PlacementError(
                f"{size} ranks need a GPU each, and the last group left "
                f"{counted(len(self._devices), 'GPU')}; make a new engine for more"
            )
        self._size = size
        if not self._ranks:
            self.place(start)

    def _start_template(self, _: str) -> Template:
        return Template(self._starter, self._model_code, self._on_template_end)

    def _on_template_end(self, template: Template) -> None:
        """Has a template that has ended replaced. One that has ended in its imports is not, until
        another group has started: a rank says what is wrong with them."""
        if not self.spares.count:
            return
        ended = node_agent.describe_exit(template.exit_status() or 0)
        logger.warning("the template process (pid %d) has ended: %s", template.pid, ended)
        self.spares.usable()
        if template.has_imported:
            self.spares.fill([Template.node_id], _RENEW_S)

    def _start_rank(self, ends: Sequence[End]) -> Process:
        """Forks a process from the template, or starts an interpreter."""
        for template in self.spares.usable():
            if not template.is_prepared():
                continue
            reason = template.refusal
            if reason is None:
                try:
                    return template.fork(_PROGRAM, ends)
                except OSError as error:
                    reason = str(error)
            else:
                self.spares.close()
            logger.warning("a rank is not forked, its imports take longer: %s", reason)
        return self._starter.start_process(_PROGRAM, ends)

    def prepare(self, kept: frozenset[int] | None = None) -> None:
        """Starts the processes; the i-th becomes rank i."""
        ranks: list[RankProcess] = []
        with contextlib.ExitStack() as undo:
            for rank in range(self._size):
                if rank in (kept or ()):
                    ranks.append(self._ranks[rank])
                else:
                    ranks.append(RankProcess(f"rank {rank}", self._start_rank))
                undo.callback(ranks[rank].end)
            undo.pop_all()
        self._ranks = ranks
        self.agents.children = {process.pid: process for process in ranks}

    def start(self, epoch: int, timeout_s: float, check: Check) -> list[Started]:
        """See `Home`; the processes have their channels already."""
        devices = self._devices[: self._size]
        each = zip(self._ranks, devices, strict=True)
        return [(replace(child.place, devices=gpus), child.channels) for child, gpus in each]

    def kill(self) -> None:
        for process in self._ranks:
            process.end()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._starter.stop)
            stack.callback(self.agents.close)
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
