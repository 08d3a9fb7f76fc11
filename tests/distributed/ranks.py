"""Ranks as real processes, which run the tasks that a test sends them."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import TCPStore

from tpengine.distributed import collectives as collectives_module
from tpengine.distributed.collectives import GlooCollectives, connect_ranks
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import Meeting, make_store
from tpengine.messages import Rendezvous

ADDRESS = "127.0.0.1"
ANSWER_TIMEOUT_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tpengine.distributed.collectives", "tpengine.worker.worker"])


@dataclass
class Rank:
    """State that a process keeps between tasks.

    Attributes:
        groups: by name.
        kept: values that tasks store for later tasks.
    """

    rank: int
    size: int
    groups: dict[str, ParallelState] = field(default_factory=dict)
    stores: dict[str, TCPStore] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ParallelState:
        return self.groups[name]


Task = Callable[..., Any]


def _serve(rank: int, size: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    state = Rank(rank, size)
    while True:
        try:
            task, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, task(state, *args)))
        except Exception as error:
            connection.send((False, error))


class Ranks:
    """Processes, one per rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def start(self, rank: int, task: Task, *args: Any) -> None:
        """Starts a task on a rank."""
        self._connections[rank].send((task, args))

    def outcome(self, rank: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Waits for a rank's task; returns its result, or the exception that it raised."""
        assert self._connections[rank].poll(timeout_s), f"rank {rank} gave no answer"
        return self._connections[rank].recv()[1]

    def outcomes(self, task: Task, *args: Any) -> list[Any]:
        """Runs a task on all ranks at once; results or exceptions in rank order."""
        for rank in range(self.size):
            self.start(rank, task, *args)
        return [self.outcome(rank) for rank in range(self.size)]

    def run(self, task: Task, *args: Any) -> list[Any]:
        """Runs a task on all ranks at once; results in rank order."""
        outcomes = self.outcomes(task, *args)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def connect(self, kind: str = "shared memory", name: str = "", timeout_s: float = 20.0) -> None:
        """Connects the ranks as group `name`; the default name is the kind."""
        self.run(connect, kind, name or kind, self.rendezvous(name or kind, timeout_s))

    def rendezvous(
        self, name: str = "", timeout_s: float = 20.0, connect_timeout_s: float = 30.0
    ) -> Rendezvous:
        """Opens a store at rank 0."""
        self.start(0, open_store, name)
        port = self.outcome(0)
        engine_id = f"{os.getpid()}_{uuid.uuid4().hex[:8]}"
        return Rendezvous(engine_id, 0, [ADDRESS] * self.size, port, connect_timeout_s, timeout_s)

    def kill(self, rank: int) -> None:
        """Kills a rank with SIGKILL, even if it is frozen."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(rank, signal.SIGKILL)

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank."""
        os.kill(self.processes[rank].pid, number)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes."""
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join(10)


def open_store(state: Rank, name: str) -> int:
    state.stores[name] = make_store(ADDRESS)
    return state.stores[name].port


def connect(state: Rank, kind: str, name: str, rendezvous: Rendezvous) -> None:
    master = state.stores.get(name)
    if "gloo" in kind:
        group = GlooCollectives(Meeting(state.rank, rendezvous, master))
        state.groups[name] = ParallelState(state.rank, state.size, group)
        return
    state.groups[name], line = connect_ranks(state.rank, rendezvous, torch.device("cpu"), master)
    assert line.endswith(kind), line


def connect_by_any_means(state: Rank, rendezvous: Rendezvous) -> str:
    state.groups["any"], line = connect_ranks(
        state.rank, rendezvous, torch.device("cpu"), state.stores.get("")
    )
    return line


def hide_shared_memory(state: Rank, blind_rank: int) -> None:
    """Simulates a rank in another container, which does not see the shared memory."""
    if state.rank == blind_rank:
        collectives_module.shared_memory.find_segment = lambda *_: None


def refuse_memory(state: Rank, poor_rank: int) -> None:
    """Simulates a rank whose machine has too little for a segment."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if state.rank == poor_rank:
        os.posix_fallocate = refuse


def refuse_to_map(state: Rank, poor_rank: int) -> None:
    """Simulates a rank at its limit of memory."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if state.rank == poor_rank:
        collectives_module.SharedMemoryCollectives = refuse
