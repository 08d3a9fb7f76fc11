"""Ranks as Ray actors: Ray places, starts and watches them; a step is a message of our own."""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tpengine import envs
from tpengine.config import EngineConfig, RayConfig
from tpengine.errors import ConfigError, EngineError, WorkerDiedError
from tpengine.executor.codec import decode_output, encode
from tpengine.executor.exchange import StepExchange, StepFailedError
from tpengine.executor.executor import Executor
from tpengine.executor.failures import RankFailure, first_cause
from tpengine.executor.placement import (
    Placement,
    RankPlace,
    actor_options,
    cluster_nodes,
    order_places,
    rank_bundle,
)
from tpengine.executor.processes import end_processes, tail, wait_for_end
from tpengine.executor.ray_connection import RayConnection
from tpengine.executor.ray_worker import RayWorker
from tpengine.executor.transport import ChannelError, Listener
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, Rendezvous, StepInput, StepOutput

logger = init_logger(__name__)

_GRACE_S = 1.0
"""How long other ranks are heard after the first failure of a call."""
_SHUTDOWN_CALL_S = 5.0
_EXIT_S = 2.0
"""How long a rank's process may take to go before it is killed by its number."""
_COLLECTIVE_SHARE = 0.8
"""Of the step's deadline: ranks give up first, as they know whom they waited for."""


class RayExecutor(Executor):
    """One actor per rank, in a placement group.

    `load` starts the group; whatever fails on the way is undone. After a failed step the group is
    gone, and every later call says why.

    Attributes:
        places: where each rank is, in rank order; empty before `load`.
        start_times_s: seconds that each phase of the start took, in order.
    """

    def __init__(self, config: EngineConfig, connection: RayConnection | None = None) -> None:
        ray_config = config.parallel.ray
        assert ray_config is not None, "a RayExecutor needs config.parallel.ray"
        self._config = config
        self._ray_config: RayConfig = ray_config
        self._connection: RayConnection | None
        self._connection = connection or RayConnection(ray_config.address)
        self._epoch = 0
        self._engine_id = uuid.uuid4().hex[:12]
        self._placement: Placement | None = None
        self._actors: list[Any] = []
        self._exchange: StepExchange | None = None
        self._lost: EngineError | None = None
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self.places: list[RankPlace] = []
        self.start_times_s: dict[str, float] = {}

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

    def load(self) -> list[str]:
        """Places the ranks, starts and connects them, and loads the model.

        Raises:
            PlacementError: the cluster has no room.
            EngineError: a rank's own error; nothing is left behind.
        """
        self._epoch += 1
        try:
            self._timed("placement", self._place)
            self._timed("processes", self._start_actors)
            self._timed("channels", self._open_channels)
            self._timed("imports", self._create_workers)
            if len(self._actors) > 1:
                self._timed("rendezvous", self._rendezvous)
            devices: list[str] = self._timed("devices", lambda: self._run_workers("init_device"))
            self._timed("weights", lambda: self._run_workers("load_model"))
        except BaseException:
            self._teardown(orderly=False)
            raise
        return [
            f"{device} (rank {rank}: {self.places[rank]})" for rank, device in enumerate(devices)
        ]

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """See `Executor`."""
        ledgers: list[MemoryLedger]
        ledgers = self._timed("profile", super().profile_num_available_blocks)
        return ledgers

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `Executor`; the last phase of the start."""
        self._timed(
            "cache", lambda: self._run_workers("init_cache_engine", num_blocks, num_host_blocks)
        )
        times = ", ".join(f"{name} {spent:.2f} s" for name, spent in self.start_times_s.items())
        total = sum(self.start_times_s.values())
        logger.info("ranks ready in %.2f s: %s", total, times)

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step on every rank, over the channels; the answer is rank 0's.

        Raises:
            EngineError: a rank failed; the group is gone.
        """
        if self._exchange is None:
            self._raise_gone()
        try:
            answers = self._exchange.run(step.step, encode(step), self._ray_config.step_timeout_s)
            return decode_output(answers[0])
        except StepFailedError as failed:
            error = self._explain(failed.failures, f"step {step.step}")
        except BaseException as unexpected:  # the ranks may have run the step: they are ahead
            error = EngineError(f"step {step.step} was interrupted: {unexpected!r}")
            self._lose(error)
            raise
        self._lose(error)
        raise error

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._call_all(method, lambda _, actor: actor.call.remote(method, args, kwargs))

    def _call_all(self, phase: str, call: Callable[[int, Any], Any]) -> list[Any]:
        """Calls every actor at once; answers in rank order, or the first failing rank's error."""
        if not self._actors:
            self._raise_gone()
        deadline = time.monotonic() + self._ray_config.start_timeout_s
        refs = [call(rank, actor) for rank, actor in enumerate(self._actors)]
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        answers: dict[int, Any] = {}
        failures: dict[int, RankFailure | EngineError] = {}
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for ref in ready:
                rank = rank_of[ref]
                answer = self._result(ref, rank, phase)
                if isinstance(answer, (RankFailure, EngineError)):
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    answers[rank] = answer
        if not failures:
            limit = self._ray_config.start_timeout_s
            for ref in waiting:
                failures[rank_of[ref]] = WorkerDiedError(
                    f"no answer from {self._who(rank_of[ref])} within {limit:.0f} s in {phase}; "
                    "raise start_timeout_s if it only needs longer"
                )
        if failures:
            raise self._explain(failures, phase)
        return [answers[rank] for rank in range(len(refs))]

    def _result(self, ref: Any, rank: int, phase: str) -> Any:
        try:
            return ray.get(ref, timeout=self._ray_config.start_timeout_s)
        except RayActorError as error:
            return self._death(rank, phase, str(error))
        except (RayError, GetTimeoutError) as error:
            return EngineError(f"{self._who(rank)} failed in {phase}: {error}")

    def _place(self) -> None:
        parallel = self._config.parallel
        bundle = rank_bundle(self._config.device, self._ray_config.bundle)
        self._placement = Placement(
            bundle,
            parallel.tensor_parallel_size,
            self._ray_config.placement_strategy,
            self._ray_config.placement_timeout_s,
        )

    def _start_actors(self) -> None:
        assert self._placement is not None
        bundle = rank_bundle(self._config.device, self._ray_config.bundle)
        actor_class = ray.remote(RayWorker)
        environment = envs.for_ranks()
        self._actors = [
            actor_class.options(
                **actor_options(bundle),
                scheduling_strategy=self._placement.strategy(index),
                max_restarts=0,
                max_task_retries=0,
            ).remote(environment)
            for index in range(self._config.parallel.tensor_parallel_size)
        ]
        found = self._call_all("start", lambda _, actor: actor.describe.remote())
        order = order_places([place for place, _ in found], self._node_id)
        self._actors = [self._actors[index] for index in order]
        self.places = [found[index][0] for index in order]
        for rank, index in enumerate(order):
            changed = ", ".join(found[index][1]) or "none"
            logger.info("rank %d on %s; variables set: %s", rank, self.places[rank], changed)

    def _open_channels(self) -> None:
        address = next(node.address for node in cluster_nodes() if node.node_id == self._node_id)
        timeout_s = min(30.0, self._ray_config.start_timeout_s)
        secret = secrets.token_bytes(32)
        listener = Listener(address, secret, self._epoch)
        try:
            refs = [
                actor.join.remote(rank, self._epoch, listener.address, secret, timeout_s)
                for rank, actor in enumerate(self._actors)
            ]
            channels = listener.accept(len(refs), timeout_s)
            self._exchange = StepExchange(channels, self._epoch)
        finally:
            listener.close()
        self._call_all("join", lambda rank, _: refs[rank])
        logger.info("channels to the ranks from %s:%d", *listener.address)

    def _create_workers(self) -> None:
        configs = [self._config.for_rank(rank) for rank in range(len(self._actors))]
        self._call_all("create", lambda rank, actor: actor.create.remote(configs[rank]))

    def _rendezvous(self) -> None:
        start_s = self._ray_config.start_timeout_s
        host = self.places[0].address
        refs = [self._actors[0].call.remote("open_rendezvous", (host,), {})]
        port = self._result(refs[0], 0, "open_rendezvous")
        if isinstance(port, (RankFailure, EngineError)):
            raise self._explain({0: port}, "open_rendezvous")
        rendezvous = Rendezvous(
            engine_id=self._engine_id,
            epoch=self._epoch,
            addresses=[place.address for place in self.places],
            port=port,
            connect_timeout_s=min(60.0, start_s),
            collective_timeout_s=_COLLECTIVE_SHARE * self._ray_config.step_timeout_s,
        )
        for rank, line in enumerate(self._run_workers("connect", rendezvous)):
            logger.info("rank %d: %s", rank, line)

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return work()
        finally:
            self.start_times_s[phase] = time.monotonic() - start

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self.places[rank]}" if self.places else f"actor {rank}"

    def _explain(self, failures: dict[int, Any], phase: str) -> EngineError:
        """The error of the rank that the others failed after."""
        rank = first_cause(failures)
        failure = failures[rank]
        if isinstance(failure, RankFailure):
            return failure.to_error()
        if isinstance(failure, ChannelError):
            return self._death(rank, phase, str(failure))
        assert isinstance(failure, EngineError)
        return failure

    def _death(self, rank: int, phase: str, reason: str) -> WorkerDiedError:
        tail = self._last_words(rank)
        return WorkerDiedError(
            f"{self._who(rank)} is dead or frozen, in {phase}: {reason}"
            + (f"\nlast lines of its error log:\n{tail}" if tail else "")
        )

    def _last_words(self, rank: int) -> str:
        """The end of the rank's error log, where that lies on this machine."""
        if not self.places or self.places[rank].node_id != self._node_id:
            return ""
        return tail(self.places[rank].log_path)

    def _raise_gone(self) -> NoReturn:
        if self._lost is not None:
            raise EngineError(f"the ranks are gone since: {self._lost}") from self._lost
        raise EngineError("the engine was shut down; make a new one")

    def _lose(self, error: EngineError) -> None:
        self._lost = error
        self._teardown(orderly=False)

    def shutdown(self) -> None:
        """Ends the ranks and gives their bundles back; a second call does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._teardown(orderly=True)
            connection.close()

    def _teardown(self, orderly: bool) -> None:
        """No process of the group is left on this machine when it returns, nor its bundles held.

        Orderly: the workers may clean up before they go.
        """
        actors, self._actors = self._actors, []
        exchange, self._exchange = self._exchange, None
        placement, self._placement = self._placement, None
        if ray.is_initialized():
            if orderly and exchange is not None:
                refs = [actor.call.remote("shutdown", (), {}) for actor in actors]
                with contextlib.suppress(RayError):
                    ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_CALL_S)
            for actor in actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor, no_restart=True)
        local = [(p.pid, p.start_ticks) for p in self.places if p.node_id == self._node_id]
        if orderly:  # a rank that the channel's end ends first would be reported as crashed
            wait_for_end(local, _EXIT_S)
        if exchange is not None:
            exchange.close()
        end_processes(local, _EXIT_S)
        if placement is not None and ray.is_initialized():
            placement.remove()
