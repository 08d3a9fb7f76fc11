"""Processes kept ready to become ranks: started, with torch imported, holding no device."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpengine.executor.launch.node_agent import Agents
from tpengine.executor.launch.placement import RankPlace
from tpengine.executor.launch.ray_worker import RayWorker

_ANSWER_S = 0.5
"""How long one that has imported everything may take to say that it lives."""


@dataclass(slots=True, eq=False)
class _Spare:
    """An actor in waiting.

    Attributes:
        prepared: Ray's reference to its place, there once it has imported everything.
    """

    node_id: str
    actor: Any
    prepared: Any


class Spares:
    """Actors without resources on the nodes of the ranks. They end with the driver, as all its
    actors do.

    Args:
        count: how many there shall be.
        environment: variables of the driver for them.
    """

    def __init__(self, count: int, environment: dict[str, str], agents: Agents) -> None:
        self._count = count
        self._environment = environment
        self._agents = agents
        self._spares: list[_Spare] = []
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def fill(self, node_ids: Sequence[str], delay_s: float = 0.0) -> None:
        """Starts what is missing, without waiting.

        Args:
            node_ids: of the ranks, in whose proportion spares are spread over nodes.
            delay_s: until then; unless `take` or `close` come before.
        """
        if not self._count:
            return
        with self._lock:
            self._cancel()
            self._timer = threading.Timer(delay_s, self._fill, (list(node_ids),))
            self._timer.daemon = True
            self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fill(self, node_ids: list[str]) -> None:
        """In the timer's thread."""
        with self._lock:
            if self._timer is not threading.current_thread() or not ray.is_initialized():
                return  # it was cancelled meanwhile
            self._timer = None
            wanted = Counter(node_ids[i % len(node_ids)] for i in range(self._count))
            wanted.subtract(spare.node_id for spare in self._spares)
            for node_id, missing in wanted.items():
                for _ in range(min(missing, self._count - len(self._spares))):
                    self._start(node_id)

    def _start(self, node_id: str) -> None:
        actor = (
            ray.remote(RayWorker)
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(self._environment)
        )
        self._spares.append(_Spare(node_id, actor, actor.prepare.remote()))

    def take(self, node_ids: Sequence[str]) -> list[Any | None]:
        """An actor on each of these nodes, rather one that is ready than one that still imports;
        None: there is none."""
        with self._lock:
            self._cancel()
            usable = self._usable() if self._spares else []
            taken: list[Any | None] = []
            for node_id in node_ids:
                spare = next((spare for spare in usable if spare.node_id == node_id), None)
                taken.append(None if spare is None else spare.actor)
                if spare is not None:
                    usable.remove(spare)
                    self._spares.remove(spare)
            return taken

    def places(self) -> list[RankPlace]:
        """Of those that are ready."""
        with self._lock:
            return [ray.get(spare.prepared, timeout=_ANSWER_S) for spare in self._prepared()]

    def _prepared(self) -> list[_Spare]:
        refs = [spare.prepared for spare in self._spares]
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        return [spare for spare in self._spares if spare.prepared in ready]

    def _usable(self) -> list[_Spare]:
        """Those that live, the ready ones first; the dead and the frozen are ended."""
        prepared = self._prepared()
        others = [spare for spare in self._spares if spare not in prepared]
        pings = {spare.actor.describe.remote(): spare for spare in prepared}
        answers: list[Any] = []
        if pings:
            answers, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_ANSWER_S)
        usable = []
        for ping, spare in pings.items():
            try:
                if ping in answers:
                    ray.get(ping, timeout=_ANSWER_S)
                    usable.append(spare)
                    continue
            except RayError:
                pass
            self._spares.remove(spare)
            self._end(spare)
        return usable + others

    def _end(self, spare: _Spare) -> None:
        with contextlib.suppress(RayError):
            ray.kill(spare.actor, no_restart=True)
        with contextlib.suppress(RayError):
            # Its own process ends it when Ray asks, which one that is stopped cannot.
            if ray.wait([spare.prepared], timeout=0)[0]:
                process = ray.get(spare.prepared, timeout=_ANSWER_S).process
                self._agents.tell(spare.node_id, "signal", process, signal.SIGKILL)

    def close(self) -> None:
        """Ends them."""
        with self._lock:
            self._cancel()
            while self._spares:
                self._end(self._spares.pop())
