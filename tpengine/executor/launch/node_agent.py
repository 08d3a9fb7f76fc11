"""What must be done to a rank on its own node: signals, stacks, logs, and whether the node answers.

On the driver's node the driver does it itself; on every other node that holds ranks an actor does,
which asks for no resources. Whether a node lives is its agent's answer, not Ray's view: Ray holds a
machine whose link is cut for alive for a minute.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpengine import host
from tpengine.errors import EngineError
from tpengine.executor import processes
from tpengine.executor.processes import EndWatch, Process

ANSWER_S = 2.0
"""How long a node may take to answer before it counts as gone."""
_START_S = 15.0
"""How long the process of an agent may take to come up on a node that nobody has heard of yet."""
_THREADS = 4
"""So that an agent answers while it waits for something else."""
_SLICE_S = 0.2


class NodeSilentError(EngineError):
    """A node does not answer."""


class NodeAgent:
    """One node's hands; each method concerns processes of that node only."""

    def __init__(self) -> None:
        self._ends = EndWatch()

    def ping(self) -> int:
        """Answers, with the number of its process."""
        return os.getpid()

    def watch(self, ranks: Sequence[Process]) -> None:
        """Remembers the ranks of this node, while they live, so that their end can be told."""
        self._ends.watch(ranks)

    def look(self, process: Process, patience_s: float) -> tuple[str, str]:
        """(how it ended, its state by Linux's letter); each is empty where there is none.

        Args:
            patience_s: for a process that is about to end.
        """
        return self._ends.describe(process, patience_s), processes.state(process)

    def state(self, process: Process) -> str:
        """Linux's letter; empty: it is gone."""
        return processes.state(process)

    def stack(self, process: Process) -> str:
        """Its Python stacks, or why there are none."""
        return processes.python_stack(process[0]) if processes.state(process) else ""

    def tail(self, path: str) -> str:
        """The end of a log file."""
        return processes.tail(path)

    def signal(self, process: Process, number: int) -> None:
        """Sends a signal."""
        processes.send_signal(process, number)

    def wait_for_end(self, ranks: Sequence[Process], patience_s: float) -> list[Process]:
        """Waits for processes to go and removes what they left in shared memory; returns those
        that are still there."""
        left = processes.wait_for_end(ranks, patience_s)
        host.sweep_segments()
        return left

    def close(self) -> None:
        """Lets go of the processes it watched."""
        self._ends.close()


class Agents:
    """The agents of all nodes that an engine has to do with; they outlive its groups of ranks.

    Args:
        own_node_id: the driver's node, where this process acts itself; another string makes it
            use an actor there, too.
    """

    def __init__(self, own_node_id: str) -> None:
        self._own_node_id = own_node_id
        self._own = NodeAgent()
        self._actors: dict[str, Any] = {}
        self._started_at: dict[str, float] = {}  # of agents that have not answered yet

    def open(self, node_ids: Iterable[str]) -> None:
        """Starts the agents of nodes that have none, without waiting for them."""
        for node_id in set(node_ids) - {self._own_node_id} - self._actors.keys():
            self._started_at[node_id] = time.monotonic()
            self._actors[node_id] = (
                ray.remote(NodeAgent)
                .options(
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=_THREADS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote()
            )

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """What a node's agent answers.

        Raises:
            NodeSilentError: it does not within the timeout.
        """
        if node_id == self._own_node_id:
            return getattr(self._own, method)(*args)
        actor = self._actors.get(node_id)
        if actor is None or not ray.is_initialized():
            raise NodeSilentError(f"node {node_id} has no agent")
        try:
            answer = ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
        except (RayError, GetTimeoutError) as error:
            raise NodeSilentError(
                f"node {node_id} does not answer within {timeout_s:g} s: {error}"
            ) from error
        self._started_at.pop(node_id, None)
        return answer

    def is_starting(self, node_id: str) -> bool:
        """Whether an agent may not be up yet, so that its silence says nothing of its node."""
        started_at = self._started_at.get(node_id)
        return started_at is not None and time.monotonic() - started_at < _START_S

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        """Has a node's agent do something, without waiting unless it is this node."""
        if node_id == self._own_node_id:
            getattr(self._own, method)(*args)
        elif (actor := self._actors.get(node_id)) is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                getattr(actor, method).remote(*args)

    def silent(self, node_ids: Iterable[str], check: Callable[[], None]) -> set[str]:
        """Those of the nodes that do not answer; all are asked at once.

        An agent that is new has longer, as its process has to start first; one whose process died
        is replaced, as that does not mean that its node did.

        Args:
            check: called again and again meanwhile; what it raises ends the wait.
        """
        asked = set(node_ids) - {self._own_node_id}
        known = asked & self._actors.keys()
        silent, dead = self._unanswered(known, ANSWER_S, check)
        for node_id in dead:
            del self._actors[node_id]
        new = (asked - known) | dead
        self.open(new)
        unanswered, dead = self._unanswered(new, _START_S, check)
        for node_id in unanswered | dead:
            self._forget(node_id)
        return silent | unanswered | dead

    def _unanswered(
        self, node_ids: set[str], timeout_s: float, check: Callable[[], None]
    ) -> tuple[set[str], set[str]]:
        """(nodes that gave no answer, nodes whose agent's process is gone)."""
        deadline = time.monotonic() + timeout_s
        node_of = {self._actors[node_id].ping.remote(): node_id for node_id in node_ids}
        waiting, dead = list(node_of), set()
        while waiting and time.monotonic() < deadline:
            check()
            ready, waiting = ray.wait(waiting, timeout=_SLICE_S)
            for ref in ready:
                try:
                    ray.get(ref, timeout=ANSWER_S)
                except RayError:  # also if it can never be scheduled
                    dead.add(node_of[ref])
        return {node_of[ref] for ref in waiting}, dead

    def _forget(self, node_id: str) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actors.pop(node_id), no_restart=True)

    def close(self) -> None:
        """Ends the agents."""
        self._own.close()
        for node_id in list(self._actors):
            self._forget(node_id)
