"""Ranks that run as Ray actors: Ray places, starts and ends the processes.

If Ray no longer answers, or starts no rank, when a lost group is to be replaced whose ranks all ran
on the driver's machine, the next groups are the driver's own children (`ProcessHome`). On several
machines the rebuild is repeated until Ray starts ranks again.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from functools import partial
from typing import Any

import ray

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.errors import ConfigError, EngineError, GroupLostError, PlacementError
from tpengine.executor.channel import Channel, ChannelTimeoutError, Check, Invitation, Listener
from tpengine.executor.diagnosis import START, Failure, RankPlace, RanksFailedError
from tpengine.executor.home import Home, Lost, Start, Started, keeps_memory
from tpengine.executor.launch import actors
from tpengine.executor.launch.actors import ActorCalls, ActorSpare, Agents
from tpengine.executor.launch.placement import (
    Placement,
    Placer,
    actor_options,
    channel_address,
    cluster_nodes,
    order_places,
    rank_bundle,
)
from tpengine.executor.launch.processes import ProcessHome
from tpengine.executor.launch.ray_calls import RaySilentError, check_answers
from tpengine.executor.launch.ray_connection import RAY_IS_GONE, RayConnection
from tpengine.executor.launch.ray_messages import hide_deaths
from tpengine.executor.rank_tls import check_at_start
from tpengine.executor.spares import Spares
from tpengine.logger import init_logger

logger = init_logger(__name__)

_LOOK_S = 3.0
"""How long Ray gets to find room for more ranks, while others serve."""
_MOST_FAILED = 2
"""So many starts in a row in which a rank did not appear: Ray counts as dead. One may be chance."""


class RayHome(Home):
    """A cluster of Ray: one actor per rank, in a placement group; addresses of nodes are those that
    Ray knows.

    Args:
        connection: to the cluster; closed with this home.
    """

    agents: Agents

    def __init__(self, config: EngineConfig, connection: RayConnection) -> None:
        ray_config = config.parallel.ray
        assert ray_config is not None, "ranks in a cluster of Ray need config.parallel.ray"
        self._config = config
        self._ray_config = ray_config
        self._connection = connection
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self.agents = Agents(self._node_id)
        self.keeps_memory = keeps_memory(config)
        num_spares = config.parallel.own_processes.spare_workers
        self.spares: Spares[ActorSpare] = Spares(num_spares, self._start_spare)
        self._bundle = rank_bundle(config.device, ray_config.bundle)
        self._placement: Placement | None = None
        # Of the latest group, by index of the bundle; that of each rank is in `_order`.
        self._actors: dict[int, Any] = {}
        self._started: dict[int, Started] = {}
        self._new: list[int] = []  # those without a rank that goes on
        self._order: list[int] = []
        self._places_before: list[RankPlace] = []
        self._num_failed = 0  # starts in a row in which a rank did not appear

    def check(self) -> None:
        # Without a connection any call of Ray's would join a cluster or start one.
        if not ray.is_initialized():
            raise EngineError(RAY_IS_GONE)

    def _placer(self, size: int, check: Check, most_s: float = math.inf) -> Placer:
        config, find_silent = self._ray_config, partial(self.agents.silent, check=check)
        timeout_s = min(config.placement_timeout_s, max(most_s, 0.0))
        strategy = config.placement_strategy
        return Placer(self._bundle, size, strategy, timeout_s, find_silent, check)

    def has_room(self, num_more: int, check: Check) -> bool:
        """Has Ray place them for a moment, on nodes that answer."""
        try:
            placement = self._placer(num_more, check, _LOOK_S).place(set())
        except PlacementError:
            return False
        try:
            return not self.agents.silent(placement.node_ids, check)
        finally:
            placement.remove()

    def place(self, start: Start) -> None:
        check_at_start()
        with start.phase("placement"):
            placer = self._placer(self._config.parallel.world_size, start.check)
            placement = self._placement = placer.place(set())
        if self.spares.count and placement.is_borrowed:
            # Ray does not know that a spare uses a bundle: it could give it to another actor.
            logger.warning("no spare workers: the placement group is the driver's own")
            self.spares.count = 0

    def replace(self, size: int, lost: Lost, start: Start) -> None:
        """Makes sure of bundles on nodes that answer; see `Home`."""
        if lost.places:
            self._places_before, self._num_failed = lost.places, 0
        if not self._connection.is_alive:
            raise EngineError(RAY_IS_GONE)
        if self._all_ran_here:
            self._check_ray()
        with start.phase("nodes"):
            node_ids = {place.node_id for place in lost.places}
            if self._placement is not None:
                node_ids |= set(self._placement.node_ids)
            silent = self.agents.silent(node_ids, start.check)
        with start.phase("end"):
            lost.end(silent)
        with start.phase("placement"):
            old, silent_before = self._placement, set(silent)
            self._placement = old if old is not None and old.is_borrowed else None
            if old is not None and len(old.node_ids) != size:
                old.remove()
                old = None
            placer = self._placer(size, start.check, start.deadline - time.monotonic())
            self._placement = placer.replace(old, silent)
            if silent_before - silent:  # ranks on nodes that answer again have to end first
                lost.end(silent)

    @property
    def _all_ran_here(self) -> bool:
        """Whether all ranks of the last group ran on the driver's machine."""
        return {place.node_id for place in self._places_before} == {self._node_id}

    def _check_ray(self) -> None:
        """Makes sure that Ray can start ranks on the driver's machine.

        Raises:
            RaySilentError: it cannot.
        """
        self.agents.check_raylet()
        check_answers()
        if self._num_failed >= _MOST_FAILED:
            raise RaySilentError(f"Ray did not start a rank, {self._num_failed} times in a row")

    def successor(self, error: EngineError) -> ProcessHome | None:
        """If Ray does not answer, or has not started a rank several times in a row, as when its
        disk is full, and the lost ranks all ran on the driver's machine: the driver starts this
        group and all later ones as its own children, on the same devices. The placement stays, so
        that a Ray that works again gives it to no other program."""
        if not self._all_ran_here:
            return None
        reason = error
        if isinstance(error, GroupLostError):
            self._num_failed += error.loss.phase == START.phase
            try:
                self._check_ray()
            except RaySilentError as silent:
                reason = silent
        if not isinstance(reason, RaySilentError):
            return None
        logger.warning(
            "%s; from now on the ranks run as processes of this machine, without Ray", reason
        )
        self.spares.close()
        devices = [place.devices for place in self._places_before]
        if self._config.device == "cpu":
            devices = [()] * self._config.parallel.world_size
        return ProcessHome(self._config, devices)

    @property
    def _placed(self) -> Placement:
        assert self._placement is not None, "ranks before their places"
        return self._placement

    def prepare(self, kept: frozenset[int] | None = None) -> None:
        """See `Home`: chooses the actors that are there already."""
        placement, is_cpu = self._placed, self._config.device == "cpu"
        if kept is None:
            self._actors, self._started, self._order = {}, {}, []
        else:
            self._check_ray()
            for rank, index in enumerate(self._order):
                if rank not in kept:
                    del self._actors[index], self._started[index]
        num_bundles = len(placement.node_ids)
        self._new = [index for index in range(num_bundles) if index not in self._started]
        if placement.devices is None and is_cpu:
            placement.devices = [()] * num_bundles
        if placement.devices is not None:
            spares = self.spares.take([placement.node_ids[index] for index in self._new])
            for index, spare in zip(self._new, spares, strict=True):
                if spare is not None:
                    self._actors[index] = spare.actor

    def start(self, epoch: int, timeout_s: float, check: Check) -> list[Started]:
        """Has an actor become a rank in each bundle that has none. The ranks on the driver's own
        node come first."""
        placement, own_node_id = self._placed, self.agents.own_node_id
        address = channel_address(placement.node_ids, own_node_id)
        with contextlib.closing(Listener(address, secrets.token_bytes(32), epoch)) as listener:
            calls = self._call_actors(epoch, listener.invitation)
            places, channels = self._connect(listener, calls, timeout_s, check)
        pairs = zip(places, zip(channels[::2], channels[1::2], strict=True), strict=True)
        self._started |= dict(zip(self._new, pairs, strict=True))
        hide_deaths((place.node_id, place.pid) for place in places)
        places = [self._started[index][0] for index in range(len(self._started))]
        placement.devices = [place.devices for place in places]
        self._order = self._order or order_places(places, own_node_id)
        self.agents.note_places(places)
        return [self._started[index] for index in self._order]

    def _connect(
        self, listener: Listener, calls: ActorCalls, timeout_s: float, check: Check
    ) -> tuple[list[RankPlace], list[Channel]]:
        """Waits for new ranks to connect; returns their places, and two channels of each in the
        same order."""
        size, places = len(self._new), dict[int, RankPlace]()
        deadline = time.monotonic() + timeout_s

        def look(wait_s: float = 0.0) -> None:
            check()
            answers = calls.wait(wait_s)
            if failures := {n: a for n, a in answers.items() if isinstance(a, Failure)}:
                raise RanksFailedError({self._rank_of(n): a for n, a in failures.items()})
            places.update(answers)

        try:
            channels = listener.accept(size, timeout_s, look, per_rank=2)
            while len(places) < size and time.monotonic() < deadline:
                look(actors.CHECK_S)
            return [places[number] for number in range(size)], channels
        except (ChannelTimeoutError, KeyError) as error:
            reason = (
                f"no answer within {timeout_s:.0f} s: it is frozen, or its machine very slow "
                "(start_timeout_s bounds a first start; a later one has a multiple of the first)"
            )
            missing = set(range(size)) - places.keys() or range(size)
            failure = ChannelTimeoutError(reason)
            raise RanksFailedError(dict.fromkeys(map(self._rank_of, missing), failure)) from error

    def _rank_of(self, number: int) -> int:
        """Which rank a missing process will be; before the first start this is not known, and any
        number."""
        return self._order.index(self._new[number]) if self._order else number

    def _call_actors(self, epoch: int, invitation: Invitation) -> ActorCalls:
        """Starts the missing actors and has them connect."""
        placement, options, refs = self._placed, actor_options(self._bundle), {}
        for number, index in enumerate(self._new):
            devices = None
            if index in self._actors:  # a spare
                devices = (placement.devices or [])[index]
            else:
                place = placement.strategy(index), envs.for_ranks()
                self._actors[index] = actors.start(actors.RayWorker, *place, **options)
            connect = self._actors[index].connect.remote
            refs[number] = connect(devices, number, epoch, invitation)
        return ActorCalls(refs)

    def kill(self) -> None:
        if ray.is_initialized():
            actors.kill(*self._actors.values())

    def _start_spare(self, node_id: str) -> ActorSpare:
        self.check()
        return ActorSpare(node_id, self.agents, self._config.model_code)

    def give_places_back(self) -> None:
        placement, self._placement = self._placement, None
        if placement is None or not ray.is_initialized():
            return
        try:
            check_answers()
        except RaySilentError as error:
            logger.warning("the places of the ranks are not given back: %s", error)
        else:
            placement.remove()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._connection.close)
            if self._connection.is_alive:
                stack.callback(self.agents.close)
                stack.callback(self.spares.close)


def detect_device(wanted: str) -> str:
    """Settles `auto` for the cluster that is connected: cuda where it has GPUs, else cpu.

    Raises:
        ConfigError: cuda was asked for and no node has a GPU.
    """
    num_gpus = sum(node.resources.get("GPU", 0.0) for node in cluster_nodes())
    if wanted == "cuda" and not num_gpus:
        raise ConfigError(
            "device = 'cuda', but no node of the Ray cluster has a GPU; use device='cpu', or "
            "start Ray on the machines that have them (`ray start --num-gpus`)"
        )
    if wanted == "auto":
        return "cuda" if num_gpus else "cpu"
    return wanted
