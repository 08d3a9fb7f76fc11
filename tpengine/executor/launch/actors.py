"""The actors of an engine: ranks, spares that are ready to become ranks, and agents of nodes.

Ray starts and calls them; all that a rank does stands in `executor.rank`, all that an agent does in
`node_agent`. Whether a node is alive is its agent's answer, not Ray's view: Ray takes a minute to
notice that a machine's link is cut.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpengine import envs, host
from tpengine.errors import ConfigError
from tpengine.executor.channel import (
    ChannelClosedError,
    ChannelError,
    Invitation,
    connect,
)
from tpengine.executor.diagnosis import (
    AGENT_START_S,
    ANSWER_S,
    STOPPED,
    NodeSilentError,
    RankFailure,
    RankPlace,
)
from tpengine.executor.launch.node_agent import NodeAgent, Process, own_error_log
from tpengine.executor.launch.ray_calls import RaySilentError, bounded
from tpengine.executor.rank import Rank, import_all
from tpengine.executor.spares import SPARE_ANSWER_S
from tpengine.logger import init_logger

logger = init_logger(__name__)

_AGENT_THREADS = 4
"""So that an agent answers while one of its calls waits."""
_CONNECT_S = 20.0
"""How long a rank tries to connect; less than any group has to appear."""
CHECK_S = 0.2
"""Between two looks at whether a wait still makes sense."""
_KILL_S = 5.0
"""How long Ray may take to hear that an actor is to end."""


class RayWorker(Rank):
    """The actor of one rank. Constructing it imports no torch: only then does Ray say which devices
    it gets, and only after that does the driver know which rank it is."""

    def __init__(self, environment: dict[str, str]) -> None:
        changed = envs.adopt(environment)
        super().__init__()
        logger.debug("variables taken over from the driver: %s", changed)

    def prepare(self, model_code: Sequence[str | None]) -> RankPlace:
        """Imports all that a rank needs, for a spare; returns where it is."""
        import_all(model_code)
        return self.describe()

    def describe(self, devices: tuple[str, ...] | None = None) -> RankPlace:
        """Where this actor is.

        Args:
            devices: for a spare that becomes a rank: the GPUs that Ray gave the rank before it;
                None: those that Ray gave this actor.
        """
        context = ray.get_runtime_context()
        if devices is None:
            accelerators = context.get_accelerator_ids().values()
            devices = tuple(str(device) for ids in accelerators for device in ids)
        machine = context.get_node_id(), ray.util.get_node_ip_address(), socket.gethostname()
        process = os.getpid(), host.start_ticks(os.getpid()) or 0
        self.place = RankPlace(*machine, devices, *process, own_error_log())
        return self.place

    def connect(
        self, devices: tuple[str, ...] | None, number: int, epoch: int, invitation: Invitation
    ) -> RankPlace | RankFailure:
        """Connects to the driver, by one channel for steps and one for heartbeats, and serves it in
        a thread, so that Ray's own stays free; returns where this actor is.

        Args:
            devices: see `describe`.
            number: among the processes of its group.
        """
        place = self.describe(devices)
        try:
            channels = [connect(*invitation, number, epoch, _CONNECT_S, i) for i in range(2)]
        except (ChannelError, ConfigError) as error:
            self._rank = number
            return self.failure(error, "join")
        name = "tpengine-worker"
        threading.Thread(target=self.serve, args=channels, name=name, daemon=True).start()
        return place


class ActorCalls:
    """Calls that actors answer.

    Args:
        refs: Ray's references to the answers, by rank or another key.
    """

    def __init__(self, refs: Mapping[Any, Any]) -> None:
        self._key_of = {ref: key for key, ref in refs.items()}

    def wait(self, timeout_s: float) -> dict[Any, Any]:
        """Waits for at least one answer; returns new ones by key. An answer is a value, or a
        `ChannelError` for an actor that could not be called."""
        if not self._key_of:
            return {}
        ready, _ = ray.wait(list(self._key_of), timeout=timeout_s)
        return {self._key_of.pop(ref): self._answer(ref) for ref in ready}

    @staticmethod
    def _answer(ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=ANSWER_S)
        except RayActorError as error:
            return ChannelClosedError(f"Ray says: {error}")
        except RayError as error:
            return ChannelError(str(error))


def start(actor_class: type[Any], strategy: Any, *args: Any, **options: Any) -> Any:
    """Starts an actor that Ray does not start again."""
    remote = ray.remote(actor_class).options(
        scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, **options
    )
    return bounded(lambda: remote.remote(*args), f"an actor ({actor_class.__name__})", kill)


def kill(*actors: Any) -> None:
    """Has Ray end actors, if it answers."""

    def end() -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # another cluster does not know the actor
                ray.kill(actor, no_restart=True)

    with contextlib.suppress(RaySilentError):
        bounded(end, "the end of actors", limit_s=_KILL_S)


def _start_on(node_id: str, actor_class: type[Any], *args: Any, **options: Any) -> Any:
    """Starts an actor that asks for no resources, on one node."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return start(actor_class, strategy, *args, num_cpus=0, **options)


class Agents:
    """The agents of all nodes that an engine uses; see `diagnosis.NodeAgents`. They outlive its
    groups of ranks. On the driver's node the driver itself acts.

    Args:
        own_node_id: the driver's node; any other text makes it use an actor there, too.
    """

    def __init__(self, own_node_id: str) -> None:
        self.own_node_id = own_node_id
        self._own = NodeAgent()
        self._actors: dict[str, Any] = {}
        self._started_at: dict[str, float] = {}  # of agents that have not answered yet
        self._raylet: Process | None = None

    def note_places(self, places: Iterable[RankPlace]) -> None:
        """Notes which process starts actors on the driver's node: the parent of a rank there."""
        pids = (place.pid for place in places if place.node_id == self.own_node_id)
        self._raylet = next(filter(None, map(host.parent_of, pids)), self._raylet)

    def check_raylet(self) -> None:
        """Makes sure that the process lives and runs that starts actors on the driver's node.

        Raises:
            RaySilentError: it is gone or stopped.
        """
        if self._raylet is not None and (state := self._own.state(self._raylet)) in STOPPED:
            raise RaySilentError(
                f"Ray's process on the driver's machine (raylet, pid {self._raylet[0]}) is "
                f"{'stopped' if state else 'gone'}"
            )

    def open(self, node_ids: Iterable[str]) -> None:
        for node_id in set(node_ids) - {self.own_node_id} - self._actors.keys():
            self._started_at[node_id] = time.monotonic()
            self._actors[node_id] = _start_on(node_id, NodeAgent, max_concurrency=_AGENT_THREADS)

    def ask(self, node_id: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        if node_id == self.own_node_id:
            return getattr(self._own, method)(*args)
        actor = self._actors.get(node_id)
        if actor is None or not ray.is_initialized():
            raise NodeSilentError(f"node {node_id} has no agent")
        try:
            answer = ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
        except RayError as error:
            raise NodeSilentError(
                f"node {node_id} does not answer within {timeout_s:g} s: {error}"
            ) from error
        self._started_at.pop(node_id, None)
        return answer

    def is_starting(self, node_id: str) -> bool:
        started_at = self._started_at.get(node_id)
        return started_at is not None and time.monotonic() - started_at < AGENT_START_S

    def tell(self, node_id: str, method: str, *args: Any) -> None:
        if node_id == self.own_node_id:
            getattr(self._own, method)(*args)
        elif (actor := self._actors.get(node_id)) is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                getattr(actor, method).remote(*args)

    def silent(self, node_ids: Iterable[str], check: Callable[[], None]) -> set[str]:
        """Asks all of the nodes at once; returns those that do not answer.

        A new agent has longer, as its process has to start. An agent whose process died is
        replaced, since its node may be alive.

        Args:
            check: called repeatedly meanwhile; an exception of it ends the wait.
        """
        asked = set(node_ids) - {self.own_node_id}
        known = asked & self._actors.keys()
        silent, dead = self._unanswered(known, ANSWER_S, check)
        for node_id in dead:
            del self._actors[node_id]
        new = (asked - known) | dead
        self.open(new)
        unanswered, dead = self._unanswered(new, AGENT_START_S, check)
        for node_id in unanswered | dead:
            kill(self._actors.pop(node_id))
        return silent | unanswered | dead

    def _unanswered(
        self, node_ids: set[str], timeout_s: float, check: Callable[[], None]
    ) -> tuple[set[str], set[str]]:
        """(nodes that gave no answer, nodes whose agent's process is gone)."""
        deadline = time.monotonic() + timeout_s
        calls = ActorCalls({node_id: self._actors[node_id].ping.remote() for node_id in node_ids})
        silent, dead = set(node_ids), set()
        while silent and time.monotonic() < deadline:
            check()
            for node_id, answer in calls.wait(CHECK_S).items():
                silent.discard(node_id)
                if isinstance(answer, ChannelError):  # also if the agent can never be scheduled
                    dead.add(node_id)
        return silent, dead

    def close(self) -> None:
        """Ends the agents."""
        self._own.close()
        while self._actors:
            kill(self._actors.popitem()[1])


class ActorSpare:
    """An actor that may become a rank; see `spares.Spare`. It ends with the driver, as all of the
    driver's actors do.

    Args:
        model_code: see `EngineConfig`; it imports it.
    """

    def __init__(self, node_id: str, agents: Agents, model_code: Sequence[str | None]) -> None:
        self.node_id = node_id
        self.actor = _start_on(node_id, RayWorker, envs.for_ranks())
        self._agents = agents
        self._prepared = self.actor.prepare.remote(model_code)

    def is_prepared(self) -> bool:
        return bool(ray.wait([self._prepared], timeout=0)[0])

    def answer(self) -> RankPlace | None:
        calls = ActorCalls({0: self.actor.describe.remote()})
        place = calls.wait(SPARE_ANSWER_S).get(0)
        return place if isinstance(place, RankPlace) else None

    def end(self) -> None:
        kill(self.actor)
        with contextlib.suppress(RayError):
            # Ray asks the process to end itself, which a stopped one cannot do.
            if self.is_prepared():
                process = ray.get(self._prepared, timeout=SPARE_ANSWER_S).process
                self._agents.tell(self.node_id, "signal", process, signal.SIGKILL)
