"""The executor of ranks that run as Ray actors: how a group is started, replaced and ended.

Ray places, starts and ends the processes. Steps do not pass Ray: they go over the channels of the
`Group`. A group that lost a rank is ended as a whole, and `rebuild` starts the next one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import ray

from tpengine import host
from tpengine.config import EngineConfig, RayConfig
from tpengine.errors import ConfigError, EngineError, GroupLostError, RankLoss, WorkerDiedError
from tpengine.executor.codec import decode_output, encode
from tpengine.executor.diagnosis import RankPlace
from tpengine.executor.executor import Executor
from tpengine.executor.group import Group
from tpengine.executor.launch.actors import Agents, RayLauncher, Spares
from tpengine.executor.launch.placement import (
    Placement,
    Placer,
    channel_address,
    cluster_nodes,
    rank_bundle,
)
from tpengine.executor.launch.ray_connection import RAY_IS_GONE, RayConnection
from tpengine.executor.watch import StepDeadline
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, StepInput, StepOutput

logger = init_logger(__name__)

_REFILL_S = 3.0
"""Until spares are started after a rebuild: their imports would delay the waiting requests."""
_TURN_S = 30.0
"""How long `shutdown` waits for a cancelled start to stop."""
_LEAST_APPEAR_S, _APPEAR_PATIENCE = 25.0, 5.0
"""What the processes of a later group get to appear: at the least, and in multiples of the first's
time. Ray may have to end a stopped process first, which takes it five seconds."""
PROCESSES = "processes"


class StartTimes:
    """The seconds of each phase of the latest start.

    Args:
        limit_s: of any call in a start.

    Attributes:
        seconds: by phase, in order.
        appear_s: how long new processes may take to tell where they are. Until then they cannot be
            looked at. The first ones may take as long as the user allows; of a later group, one
            that takes far longer than the first did is frozen and must not delay the rebuild.
    """

    def __init__(self, limit_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self.appear_s = limit_s

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the time in the context, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start

    def note_first(self) -> None:
        """Takes the first start, which succeeded, as the measure of later ones."""
        patience_s = max(_LEAST_APPEAR_S, _APPEAR_PATIENCE * self.seconds[PROCESSES])
        self.appear_s = min(self.appear_s, patience_s)


class RayExecutor(Executor):
    """One actor per rank, in a placement group.

    `load` starts the first group, and leaves nothing behind if that fails.

    Attributes:
        nodes: addresses, as Ray knows them; those of the last group while a new one starts.
        spares: processes that may become ranks of later groups.
    """

    def __init__(self, config: EngineConfig, connection: RayConnection | None = None) -> None:
        ray_config = config.parallel.ray
        assert ray_config is not None, "a RayExecutor needs config.parallel.ray"
        self._config = config
        self._ray_config: RayConfig = ray_config
        self._connection: RayConnection | None = connection or RayConnection(ray_config.address)
        # Part of the names of files in shared memory, so that a file's owner can be told.
        self._engine_id = f"{os.getpid()}_{uuid.uuid4().hex[:12]}"
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._agents = Agents(self._node_id)
        self.spares = Spares(ray_config.spare_workers, self._agents, config.model.model_impl)
        self._deadline = StepDeadline(ray_config.step_timeout_s)
        self._placer = Placer(
            rank_bundle(config.device, ray_config.bundle),
            config.parallel.tensor_parallel_size,
            ray_config,
            lambda node_ids: self._agents.silent(node_ids, self._check),
            self._check,
        )
        self._placement: Placement | None = None
        self._launcher: RayLauncher | None = None
        self._group: Group | None = None
        self._times = StartTimes(ray_config.start_timeout_s)
        self.start_times_s = self._times.seconds
        self._peaks: list[int] = []
        self._digests: list[str] | None = None
        self.nodes = []
        self._turn = threading.Lock()
        self._is_cancelled = threading.Event()

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

    @property
    def places(self) -> list[RankPlace]:
        """Where each rank of the latest group is or was, in rank order; empty before `load`."""
        return [] if self._group is None else list(self._group.places)

    @property
    def loss(self) -> RankLoss | None:
        """See `Executor`."""
        return None if self._group is None else self._group.loss

    @property
    def epoch(self) -> int:
        """See `Executor`."""
        return 1 if self._group is None else self._group.epoch

    def load(self) -> list[str]:
        """Places the ranks, starts and connects them, and loads the model.

        Raises:
            PlacementError: the cluster has no room.
            EngineError: a rank's own error; nothing is left behind.
        """
        with self._in_turn():
            try:
                with self._times.phase("placement"):
                    self._placement = self._placer.place(set())
                if self._ray_config.spare_workers and not self._may_use_spares:
                    logger.warning("no spare workers: the placement group is the driver's own")
                self._start_group(1)
                self._times.note_first()
                return list(self.devices)
            except GroupLostError as error:
                self._end_group(orderly=False)
                failure = error.__cause__ or WorkerDiedError(error.loss.report())
            except BaseException:
                self._end_group(orderly=False)
                raise
        raise failure  # outside the `except` block, so that the rank's traceback stays its cause

    def rebuild(self) -> list[MemoryLedger]:
        """See `Executor`.

        Raises:
            PlacementError: there is no room for the ranks without the nodes that were lost.
        """
        with self._in_turn():
            if not self._is_connected:
                raise EngineError(RAY_IS_GONE)
            lost = self._group
            if lost is None or not lost.is_over:
                raise EngineError("no rank was lost: there is nothing to rebuild")
            self._times.seconds.clear()
            with self._times.phase("nodes"):
                node_ids = {place.node_id for place in lost.places}
                if self._placement is not None:
                    node_ids |= set(self._placement.node_ids)
                silent = self._agents.silent(node_ids, self._check)
            with self._times.phase("end"):
                lost.end(orderly=False, silent=silent)
                host.sweep_segments()
            with self._times.phase("placement"):
                spare_devices = self._replace_placement(silent, lost)
            try:
                self._start_group(lost.epoch + 1, spare_devices)
                with self._times.phase("profile"):
                    peaks = {rank: (peak,) for rank, peak in enumerate(self._peaks)}
                    return self._require_group().call_each("profile_num_available_blocks", peaks)
            except BaseException as error:
                if not isinstance(error, GroupLostError):
                    self._end_group(orderly=False)
                raise

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """See `Executor`."""
        with self._times.phase("profile"):
            ledgers = super().profile_num_available_blocks()
        self._peaks = [ledger.activation_peak_bytes for ledger in ledgers]
        worst = self._config.scheduler.max_num_batched_tokens
        self._deadline.observe(worst, self.start_times_s["profile"])
        return ledgers

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `Executor`; the last phase of a start."""
        with self._in_turn():
            with self._times.phase("cache"):
                self._run_workers("init_cache_engine", num_blocks, num_host_blocks)
            if self._may_use_spares:
                delay_s = 0.0 if self.epoch == 1 else _REFILL_S
                self.spares.fill([place.node_id for place in self.places], delay_s)

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step on every rank, over the channels; the answer is rank 0's.

        Raises:
            GroupLostError: a rank was lost.
        """
        group = self._require_group()
        num_tokens = sum(step.num_scheduled_tokens)
        start = time.monotonic()
        answer = group.step(step.step, encode(step), self._deadline.of(num_tokens))
        self._deadline.observe(num_tokens, time.monotonic() - start)
        return decode_output(answer)

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._require_group().call(method, *args, **kwargs)

    def _require_group(self) -> Group:
        if self._group is None or self._connection is None:
            raise EngineError("the engine was shut down; make a new one")
        return self._group

    def _check(self) -> None:
        if self._is_cancelled.is_set():
            raise EngineError("the engine is being shut down")
        # Without a connection any call of Ray's would join a cluster or start one.
        if not ray.is_initialized():
            raise EngineError(RAY_IS_GONE)

    @property
    def _may_use_spares(self) -> bool:
        """Whether spares may become ranks. Ray does not know that they use the bundle: in the
        driver's own placement group it could give the bundle to another actor."""
        return self._placement is not None and not self._placement.is_borrowed

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_alive

    def _replace_placement(self, silent: set[str], lost: Group) -> list[tuple[str, ...]] | None:
        """Makes sure of bundles on nodes that answer.

        Returns:
            The devices of each bundle; None: only Ray knows them.
        """
        old, silent_before = self._placement, set(silent)
        self._placement = old if old is not None and old.is_borrowed else None
        self._placement = placement = self._placer.replace(old, silent)
        if silent_before - silent:  # ranks on nodes that answer again have to end first
            lost.end(orderly=False, silent=silent)
        if placement is old and self._launcher is not None and self._launcher.bundle_devices:
            return list(self._launcher.bundle_devices)
        return None if self._config.device == "cuda" else [()] * len(placement.node_ids)

    def _start_group(self, epoch: int, spare_devices: list[tuple[str, ...]] | None = None) -> None:
        """Starts the ranks up to their loaded weights.

        Args:
            spare_devices: of each bundle, for a spare that takes it; None: no spare may take it.
        """
        placement = self._placement
        assert placement is not None, "ranks before their places"
        with self._times.phase(PROCESSES):
            spares: list[Any | None] = [None] * len(placement.node_ids)
            if spare_devices is not None and self._may_use_spares:
                spares = self.spares.take(placement.node_ids)
            self._launcher = RayLauncher(
                placement, self._placer.bundle, spares, spare_devices or [], self._agents
            )
            self._group = group = Group(
                epoch,
                self._config,
                self._launcher,
                self._ray_config.start_timeout_s,
                self._ray_config.step_timeout_s,
                self._check,
            )
            group.start(self._times.appear_s)
        with self._times.phase("channels"):
            group.open_channels(channel_address(group.places, self._node_id))
        with self._times.phase("imports"):
            group.create_workers()
        if len(group.places) > 1:
            with self._times.phase("rendezvous"):
                group.rendezvous(self._engine_id)
        with self._times.phase("devices"):
            lines: list[str] = group.call("init_device")
        self.nodes = [place.address for place in group.places]
        self.devices = [
            f"{line} ({place})" for line, place in zip(lines, group.places, strict=True)
        ]
        with self._times.phase("weights"):
            self._digests = group.load_model(self._digests)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Lets one thread at a time start or end groups."""
        self._check()
        if not self._turn.acquire(timeout=_TURN_S):
            raise EngineError(
                f"another thread has been starting the ranks for {_TURN_S:g} s; wait for it"
            )
        try:
            self._check()
            yield
        finally:
            self._turn.release()

    def shutdown(self) -> None:
        """Ends the ranks and gives their bundles back; a second call does nothing, or finishes
        what an interrupted first one could not."""
        connection = self._connection
        if connection is None:
            return
        self._is_cancelled.set()
        has_turn = self._turn.acquire(timeout=_TURN_S)
        try:
            if not has_turn:
                logger.warning("a start of ranks does not stop; its ranks are ended while it runs")
            with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
                stack.callback(connection.close)
                if connection.is_alive:
                    stack.callback(self._agents.close)
                    stack.callback(self.spares.close)
                self._end_group(orderly=True)
            self._connection = None
        finally:
            if has_turn:
                self._turn.release()

    def _end_group(self, orderly: bool) -> None:
        """Ends all processes of the group and gives its bundles back.

        Args:
            orderly: the workers may clean up before they end.
        """
        try:
            if self._group is not None:
                self._group.end(orderly and self._is_connected)
                host.sweep_segments()
        finally:
            placement, self._placement = self._placement, None
            if placement is not None and ray.is_initialized():
                placement.remove()
