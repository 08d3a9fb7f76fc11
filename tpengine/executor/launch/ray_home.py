"""Ranks that run as Ray actors: Ray places, starts and ends the processes.

If Ray no longer answers, or starts no rank, when a lost group is to be replaced whose ranks all ran
on the driver's machine, the next groups are the driver's own children (`ProcessHome`). On several
machines the rebuild is repeated until Ray starts ranks again.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from functools import partial

import ray

from tpengine.config import EngineConfig
from tpengine.errors import ConfigError, EngineError, GroupLostError, PlacementError
from tpengine.executor.channel import Check
from tpengine.executor.diagnosis import START
from tpengine.executor.home import EndGroup, Home, Places, StartTimes
from tpengine.executor.launch.actors import ActorSpare, Agents, RayLauncher
from tpengine.executor.launch.placement import Placement, Placer, cluster_nodes, rank_bundle
from tpengine.executor.launch.processes import ProcessHome
from tpengine.executor.launch.ray_calls import RaySilentError, check_answers
from tpengine.executor.launch.ray_connection import RAY_IS_GONE, RayConnection
from tpengine.executor.rank_tls import check_at_start
from tpengine.executor.spares import Spare, Spares
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

    def __init__(self, config: EngineConfig, connection: RayConnection) -> None:
        ranks, ray_config = config.parallel.ranks, config.parallel.ray
        assert ranks is not None, "ranks in processes of their own need config.parallel.ranks"
        assert ray_config is not None, "ranks in a cluster of Ray need config.parallel.ray"
        self._config = config
        self._ray_config = ray_config
        self._connection = connection
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._agents = Agents(self._node_id)
        self.spares = Spares(ranks.spare_workers, self._start_spare)
        self._bundle = rank_bundle(config.device, ray_config.bundle)
        self._placement: Placement | None = None
        self._launcher: RayLauncher | None = None  # the latest group's
        self._places_before: Places = []
        self._num_failed = 0  # starts in a row in which a rank did not appear

    def check(self) -> None:
        # Without a connection any call of Ray's would join a cluster or start one.
        if not ray.is_initialized():
            raise EngineError(RAY_IS_GONE)

    def _placer(self, size: int, check: Check, most_s: float = math.inf) -> Placer:
        find_silent = partial(self._agents.silent, check=check)
        timeout_s = min(self._ray_config.placement_timeout_s, max(most_s, 0.0))
        config = replace(self._ray_config, placement_timeout_s=timeout_s)
        return Placer(self._bundle, size, config, find_silent, check)

    def has_room(self, num_more: int, check: Check) -> bool:
        """Has Ray place them for a moment, on nodes that answer."""
        try:
            placement = self._placer(num_more, check, _LOOK_S).place(set())
        except PlacementError:
            return False
        try:
            return not self._agents.silent(placement.node_ids, check)
        finally:
            placement.remove()

    def place(self, times: StartTimes, check: Check) -> None:
        check_at_start()
        with times.phase("placement"):
            placer = self._placer(self._config.parallel.world_size, check)
            placement = self._placement = placer.place(set())
        if self.spares.count and placement.is_borrowed:
            # Ray does not know that a spare uses a bundle: it could give it to another actor.
            logger.warning("no spare workers: the placement group is the driver's own")
            self.spares.count = 0

    def replace(
        self,
        size: int,
        lost: Places,
        end: EndGroup,
        times: StartTimes,
        check: Check,
        deadline: float = math.inf,
    ) -> None:
        """Makes sure of bundles on nodes that answer; see `Home`."""
        if lost:
            self._places_before, self._num_failed = lost, 0
        if not self._connection.is_alive:
            raise EngineError(RAY_IS_GONE)
        if self._all_ran_here:
            self._check_ray()
        with times.phase("nodes"):
            node_ids = {place.node_id for place in lost}
            if self._placement is not None:
                node_ids |= set(self._placement.node_ids)
            silent = self._agents.silent(node_ids, check)
        with times.phase("end"):
            end(silent)
        with times.phase("placement"):
            old, silent_before = self._placement, set(silent)
            self._placement = old if old is not None and old.is_borrowed else None
            if old is not None and len(old.node_ids) != size:
                old.remove()
                old = None
            placer = self._placer(size, check, deadline - time.monotonic())
            self._placement = placer.replace(old, silent)
            if silent_before - silent:  # ranks on nodes that answer again have to end first
                end(silent)

    @property
    def _all_ran_here(self) -> bool:
        """Whether all ranks of the last group ran on the driver's machine."""
        return {place.node_id for place in self._places_before} == {self._node_id}

    def _check_ray(self) -> None:
        """Makes sure that Ray can start ranks on the driver's machine.

        Raises:
            RaySilentError: it cannot.
        """
        self._agents.check_raylet()
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

    def make_launcher(self, kept: frozenset[int] | None = None) -> RayLauncher:
        placement = self._placement
        assert placement is not None, "ranks before their places"
        launcher, is_cpu = self._launcher, self._config.device == "cpu"
        if kept is None or launcher is None:
            launcher = RayLauncher(placement, self._bundle, self._agents, is_cpu)
        else:
            self._check_ray()
            launcher.keep(kept)
        spares: list[Spare | None] = [None] * len(launcher.missing)
        if placement.devices is None and is_cpu:
            placement.devices = [()] * len(placement.node_ids)
        if placement.devices is not None:
            spares = self.spares.take(list(launcher.missing.values()))
        actors = [spare.actor if isinstance(spare, ActorSpare) else None for spare in spares]
        launcher.spares = dict(zip(launcher.missing, actors, strict=True))
        self._launcher = launcher
        return launcher

    def _start_spare(self, node_id: str) -> ActorSpare:
        self.check()
        return ActorSpare(node_id, self._agents, self._config.model_code)

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
                stack.callback(self._agents.close)
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
