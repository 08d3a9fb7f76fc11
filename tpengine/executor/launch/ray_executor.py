"""The executor of ranks that run as Ray actors: Ray places, starts and ends the processes.

If Ray no longer answers when a lost group is to be replaced whose ranks all ran on the driver's
machine, the next groups are the driver's own children (`ProcessExecutor`). On several machines the
rebuild is repeated until Ray answers.
"""

from __future__ import annotations

import contextlib

import ray

from tpengine.config import EngineConfig, RayConfig
from tpengine.errors import ConfigError, EngineError, GroupLostError
from tpengine.executor.diagnosis import RankPlace
from tpengine.executor.group import Group, Launcher
from tpengine.executor.group_executor import GroupExecutor
from tpengine.executor.launch.actors import ActorSpare, Agents, RayLauncher
from tpengine.executor.launch.placement import (
    Placement,
    Placer,
    cluster_nodes,
    rank_bundle,
)
from tpengine.executor.launch.processes import ProcessExecutor
from tpengine.executor.launch.ray_calls import RaySilentError, check_answers
from tpengine.executor.launch.ray_connection import RAY_IS_GONE, RayConnection
from tpengine.executor.rank_tls import check_at_start
from tpengine.executor.spares import Spare, Spares
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger

logger = init_logger(__name__)


class RayExecutor(GroupExecutor):
    """One actor per rank, in a placement group; addresses of nodes are those that Ray knows."""

    def __init__(self, config: EngineConfig, connection: RayConnection | None = None) -> None:
        super().__init__(config)
        ray_config = config.parallel.ray
        assert ray_config is not None, "a RayExecutor needs config.parallel.ray"
        self._ray_config: RayConfig = ray_config
        self._connection = connection or RayConnection(ray_config.address)
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._agents = Agents(self._node_id)
        self.spares = Spares(self._limits.spare_workers, self._start_spare)
        self._placer = Placer(
            rank_bundle(config.device, ray_config.bundle),
            config.parallel.tensor_parallel_size,
            ray_config,
            lambda node_ids: self._agents.silent(node_ids, self._check),
            self._check,
        )
        self._placement: Placement | None = None
        self._launcher: RayLauncher | None = None
        self._spare_devices: list[tuple[str, ...]] | None = None
        self._places_before: list[RankPlace] = []
        self._substitute: ProcessExecutor | None = None

    @staticmethod
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

    def _check(self) -> None:
        super()._check()
        if self._substitute is not None:
            return
        # Without a connection any call of Ray's would join a cluster or start one.
        if not ray.is_initialized():
            raise EngineError(RAY_IS_GONE)

    @property
    def _may_use_spares(self) -> bool:
        """Whether spares may become ranks. Ray does not know that they use the bundle: in the
        driver's own placement group it could give the bundle to another actor."""
        if self._substitute is not None:
            return True
        return self._placement is not None and not self._placement.is_borrowed

    @property
    def _can_call(self) -> bool:
        return self._substitute is not None or self._connection.is_alive

    def rebuild(self) -> list[MemoryLedger]:
        """See `Executor`. Ranks that all ran on the driver's machine need no Ray."""
        try:
            return super().rebuild()
        except (RaySilentError, GroupLostError) as error:
            reason = self._why_silent(error)
            if reason is None:
                raise
        with self._in_turn():  # else a shutdown might not end what is made here
            self._leave_ray(reason)
        return super().rebuild()

    def _why_silent(self, error: EngineError) -> RaySilentError | None:
        """Returns the error of a Ray that does not answer. None: Ray answers, the engine left Ray
        before, or the lost ranks did not all run on the driver's machine."""
        is_elsewhere = {place.node_id for place in self._places_before} != {self._node_id}
        if self._substitute is not None or is_elsewhere:
            return None
        if isinstance(error, RaySilentError):
            return error
        try:
            self._check_ray()
        except RaySilentError as silent:
            return silent
        return None

    def _check_ray(self) -> None:
        """Makes sure that Ray can start ranks on the driver's machine.

        Raises:
            RaySilentError: it cannot.
        """
        self._agents.check_raylet()
        check_answers()

    def _leave_ray(self, reason: RaySilentError) -> None:
        """Makes the driver start this group and all later ones as its own children, on the same
        devices. The placement stays, so that a Ray that answers again gives it to no other program.
        """
        logger.warning(
            "%s; from now on the ranks run as processes of this machine, without Ray", reason
        )
        devices = [place.devices for place in self._places_before]
        self._substitute = ProcessExecutor(self._config, devices)
        spares, self.spares = self.spares, self._substitute.spares
        spares.close()

    def _place(self) -> None:
        check_at_start()
        with self._times.phase("placement"):
            self._placement = self._placer.place(set())
        if self._limits.spare_workers and not self._may_use_spares:
            logger.warning("no spare workers: the placement group is the driver's own")

    def _replace(self, lost: Group) -> None:
        """Makes sure of bundles on nodes that answer."""
        self._places_before = lost.places or self._places_before
        if self._substitute is not None:
            self._end_lost(lost)
            return
        if not self._can_call:
            raise EngineError(RAY_IS_GONE)
        if {place.node_id for place in self._places_before} == {self._node_id}:
            self._check_ray()
        with self._times.phase("nodes"):
            node_ids = {place.node_id for place in lost.places}
            if self._placement is not None:
                node_ids |= set(self._placement.node_ids)
            silent = self._agents.silent(node_ids, self._check)
        self._end_lost(lost, silent)
        with self._times.phase("placement"):
            self._spare_devices = self._replace_placement(silent, lost)

    def _replace_placement(self, silent: set[str], lost: Group) -> list[tuple[str, ...]] | None:
        """Returns the devices of each bundle, for a spare that takes it; None: only Ray knows them,
        and no spare may take one."""
        old, silent_before = self._placement, set(silent)
        self._placement = old if old is not None and old.is_borrowed else None
        self._placement = placement = self._placer.replace(old, silent)
        if silent_before - silent:  # ranks on nodes that answer again have to end first
            lost.end(orderly=False, silent=silent)
        if placement is old and self._launcher is not None and self._launcher.bundle_devices:
            return list(self._launcher.bundle_devices)
        return None if self._config.device == "cuda" else [()] * len(placement.node_ids)

    def _make_launcher(self) -> Launcher:
        if self._substitute is not None:
            return self._substitute._make_launcher()
        placement = self._placement
        assert placement is not None, "ranks before their places"
        spares: list[Spare | None] = [None] * len(placement.node_ids)
        if self._spare_devices is not None and self._may_use_spares:
            spares = self.spares.take(placement.node_ids)
        self._launcher = RayLauncher(
            placement,
            self._placer.bundle,
            [spare.actor if isinstance(spare, ActorSpare) else None for spare in spares],
            self._spare_devices or [],
            self._agents,
        )
        return self._launcher

    def _start_spare(self, node_id: str) -> ActorSpare | None:
        if not ray.is_initialized():
            return None
        return ActorSpare(node_id, self._agents, self._config.model.model_impl)

    def _give_places_back(self) -> None:
        placement, self._placement = self._placement, None
        if placement is None or not ray.is_initialized():
            return
        try:
            check_answers()
        except RaySilentError as error:
            logger.warning("the places of the ranks are not given back: %s", error)
        else:
            placement.remove()

    def _close(self, stack: contextlib.ExitStack) -> None:
        stack.callback(self._connection.close)
        if self._substitute is not None:
            self._substitute._close(stack)
        if self._connection.is_alive:
            stack.callback(self._agents.close)
            stack.callback(self.spares.close)
