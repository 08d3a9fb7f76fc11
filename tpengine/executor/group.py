"""One epoch's ranks: their actors, their channels, and what becomes of them."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from tpengine.config import EngineConfig, RayConfig
from tpengine.errors import EngineError, GroupLostError, RankLoss
from tpengine.executor.alarm import Alarm
from tpengine.executor.channel import ChannelError
from tpengine.executor.diagnosis import IDLE, Coroner, Doing
from tpengine.executor.exchange import StepExchange, StepFailedError, StepStoppedError
from tpengine.executor.failures import RankFailure, first_cause
from tpengine.executor.handshake import Listener
from tpengine.executor.launch.actor_calls import ActorCalls, CallsFailedError
from tpengine.executor.launch.joining import accept_ranks
from tpengine.executor.launch.node_agent import ANSWER_S, Agents, NodeSilentError
from tpengine.executor.launch.placement import Placement, RankPlace, actor_options, order_places
from tpengine.executor.launch.ray_worker import RayWorker
from tpengine.executor.watch import RankWatch
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous

logger = init_logger(__name__)
Answers = TypeVar("Answers")

_OVER = "the engine was shut down; make a new one"
_SHUTDOWN_CALL_S = 5.0
_EXIT_S = 2.0
"""How long a rank's process may take to go before it is killed by its number, and after."""
_VERDICT_S = 30.0
"""Longer than any autopsy takes."""
_CONNECT_S = 30.0
_COLLECTIVE_SHARE = 0.8
"""Of the least deadline of a step: ranks give up first, as they know whom they waited for."""


class Group:
    """The ranks of one epoch. Once one of them is lost, all are ended, and this object only tells
    why; the next epoch is another object.

    Args:
        check: called during all that may take long; what it raises ends it.

    Attributes:
        places: where each rank is, in rank order; empty before `start_actors`.
        bundle_places: the same by index of the bundle.
    """

    def __init__(
        self,
        epoch: int,
        config: EngineConfig,
        ray_config: RayConfig,
        agents: Agents,
        check: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.places: list[RankPlace] = []
        self.bundle_places: list[RankPlace] = []
        self._config = config
        self._ray_config = ray_config
        self._agents = agents
        self._cancelled = check
        self._calls = ActorCalls([], ray_config.start_timeout_s, self._check)
        self._exchange: StepExchange | None = None
        self._watch: RankWatch | None = None
        self._coroner = Coroner(agents, epoch, [])
        self._doing = IDLE
        self._judging = threading.Lock()
        self._is_over = threading.Event()
        self._alarm = Alarm()
        self.loss: RankLoss | None = None

    def start_actors(
        self,
        placement: Placement,
        bundle: dict[str, float],
        environment: dict[str, str],
        spares: Sequence[tuple[Any, tuple[str, ...]] | None],
        driver_node_id: str,
        timeout_s: float,
    ) -> None:
        """Starts an actor per bundle, or takes a spare, and orders them as ranks.

        Args:
            environment: variables of the driver for the actors.
            spares: by index of the bundle: an actor and its devices; None: a new one is started.
            timeout_s: for them to tell where they are. Until then nobody can see what holds one
                up; Ray ends it when asked to, also one that is stopped.
        """
        actor_class = ray.remote(RayWorker)
        actors = [
            actor_class.options(
                **actor_options(bundle),
                scheduling_strategy=placement.strategy(index),
                max_restarts=0,
                max_task_retries=0,
            ).remote(environment)
            if spare is None
            else spare[0]
            for index, spare in enumerate(spares)
        ]
        devices = [None if spare is None else spare[1] for spare in spares]
        # Until they have told where they are, a loss can only name their bundles.
        self._calls = ActorCalls(actors, timeout_s, self._check)
        found = self.call_each("start", lambda index, a: a.describe.remote(devices[index]))
        self.bundle_places = [place for place, _ in found]
        order = order_places(self.bundle_places, driver_node_id)
        self._calls = self._calls.in_order(order, self._ray_config.start_timeout_s)
        self.places = [self.bundle_places[index] for index in order]
        self._coroner = Coroner(self._agents, self.epoch, self.places)
        self._agents.open(place.node_id for place in self.places)
        for node_id in {place.node_id for place in self.places}:
            self._agents.tell(node_id, "watch", self._processes_on(node_id))
        places = (f"rank {rank} on {place}" for rank, place in enumerate(self.places))
        logger.info("%s", "; ".join(places))
        logger.debug("variables set, by rank: %s", [found[index][1] for index in order])

    def open_channels(self, address: str) -> None:
        """Connects every rank by two channels, one for steps and one for beats; from then on they
        are watched.

        Args:
            address: of the driver's node.
        """
        wait_s = min(_CONNECT_S, self._ray_config.start_timeout_s)
        secret = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            listeners = []
            for _ in range(2):
                listeners.append(Listener(address, secret, self.epoch))
                stack.callback(listeners[-1].close)
            addresses = listeners[0].address, listeners[1].address
            refs = self._calls.start(
                lambda rank, actor: actor.join.remote(rank, self.epoch, addresses, secret, wait_s)
            )
            steps, controls = self._settled(
                Doing("join"),
                lambda: accept_ranks(
                    listeners, self._calls, refs, self._coroner, wait_s, self._check
                ),
            )
            self._exchange = StepExchange(steps, self.epoch, self._alarm)
        self._watch = RankWatch(controls, self._is_frozen, self._on_loss)
        self._watch.start()
        self.call_each("join", lambda rank, _: refs[rank])
        logger.debug("channels to the ranks from %s:%d and :%d", *addresses[0], addresses[1][1])

    def create_workers(self) -> None:
        """Has every rank make its worker, which imports torch."""
        configs = [self._config.for_rank(rank) for rank in range(len(self.places))]
        self.call_each("create", lambda rank, actor: actor.create.remote(configs[rank]))

    def rendezvous(self, engine_id: str) -> None:
        """Connects the ranks with each other.

        Args:
            engine_id: unique to the engine.
        """
        host = self.places[0].address
        port = self.call_each(
            "open_rendezvous", lambda _, a: a.call.remote("open_rendezvous", (host,), {}), [0]
        )[0]
        rendezvous = Rendezvous(
            engine_id=engine_id,
            epoch=self.epoch,
            addresses=[place.address for place in self.places],
            port=port,
            connect_timeout_s=min(60.0, self._ray_config.start_timeout_s),
            collective_timeout_s=_COLLECTIVE_SHARE * self._ray_config.step_timeout_s,
        )
        logger.info("%s", "; ".join(self.call("connect", rendezvous)))

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every worker; answers in rank order.

        Raises:
            GroupLostError: a rank was lost.
            EngineError: a rank's own exception.
        """
        return self.call_each(method, lambda _, actor: actor.call.remote(method, args, kwargs))

    def call_each(
        self, phase: str, call: Callable[[int, Any], Any], ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """The same with a call of Ray's per rank."""
        return self._settled(Doing(phase), lambda: self._calls.run(call, ranks))

    def _settled(self, doing: Doing, run: Callable[[], Answers]) -> Answers:
        """What `run` returns; whoever fails in it, the group is lost, or the start is."""
        with self._during(doing):
            try:
                return run()
            except CallsFailedError as failed:
                rank = first_cause(failed.failures)
                failure = failed.failures[rank]
        if isinstance(failure, RankFailure) and not failure.is_consequence:  # noqa: SIM102
            # An error that is not ours may be the machine's, and another start may go well.
            if failure.is_ours or self.epoch == 1:
                raise failure.to_error()
        raise self._lost(rank, failure, doing)

    def step(self, number: int, payload: bytes, timeout_s: float) -> bytes:
        """Runs a step on every rank; returns rank 0's answer.

        Raises:
            GroupLostError: a rank was lost.
        """
        doing = Doing("execute_model", number)
        with self._during(doing):
            assert self._exchange is not None, "a step before the channels were opened"
            try:
                return self._exchange.run(number, payload, timeout_s)[0]
            except StepFailedError as failed:
                rank = first_cause(failed.failures)
                raise self._lost(rank, failed.failures[rank], doing) from None
            except StepStoppedError:
                raise GroupLostError(self._verdict()) from None
            except BaseException as error:  # the ranks may have run the step: they are ahead
                reason = f"step {number} was interrupted at the driver: {error!r}"
                self._lost(0, ChannelError(reason), doing)
                raise

    @contextlib.contextmanager
    def _during(self, doing: Doing) -> Iterator[None]:
        self._check()
        self._doing = doing
        try:
            yield
        finally:
            self._doing = IDLE

    def _check(self) -> None:
        self._cancelled()
        if self.loss is not None:
            raise GroupLostError(self.loss)
        if self._is_over.is_set():
            raise EngineError(_OVER)

    def _is_frozen(self, rank: int, silent_s: float) -> bool:
        # torch's libraries are loaded under Python's lock, from a disk that may be far away.
        return self._coroner.is_frozen(rank, silent_s, may_hold=self._doing.phase == "create")

    def _on_loss(self, rank: int, failure: ChannelError) -> None:
        self._lost(rank, failure, self._doing)

    def _lost(
        self, rank: int, failure: RankFailure | ChannelError, doing: Doing
    ) -> GroupLostError | EngineError:
        """Settles what became of the group, unless somebody has already, and ends its ranks."""
        if not self._judging.acquire(timeout=_VERDICT_S):
            return EngineError(f"nobody settled within {_VERDICT_S:g} s why ranks were lost")
        try:
            if self.loss is None:
                if self._is_over.is_set():
                    return EngineError(_OVER)
                loss = self._explain(rank, failure, doing)
                self._kill()
                self.loss = loss
                self._alarm.ring()
        finally:
            self._judging.release()
        error = GroupLostError(self.loss)
        if isinstance(failure, RankFailure):
            error.__cause__ = failure.to_error()
        return error

    def _explain(self, rank: int, failure: RankFailure | ChannelError, doing: Doing) -> RankLoss:
        if self.places:
            said = "" if self._watch is None else self._watch.last_said(rank)
            return self._coroner.explain(rank, failure, doing, said)
        place = f"an actor of bundle {rank} that has not told where it is"
        return RankLoss(rank, place, self.epoch, doing.step, doing.phase, str(failure))

    def _verdict(self) -> RankLoss:
        """The loss that another thread is settling."""
        if self._judging.acquire(timeout=_VERDICT_S):
            self._judging.release()
        if self.loss is None and self._is_over.is_set():
            raise EngineError(_OVER)
        if self.loss is None:
            raise EngineError(f"nobody settled within {_VERDICT_S:g} s why ranks were lost")
        return self.loss

    def _processes_on(self, node_id: str) -> list[tuple[int, int]]:
        return [place.process for place in self.places if place.node_id == node_id]

    def _kill(self) -> None:
        """Ends every rank at once, also one that is stopped."""
        if self._watch is not None:
            self._watch.stop()
        for place in self.places:
            self._agents.tell(place.node_id, "signal", place.process, signal.SIGKILL)
        self._calls.kill()

    def end(self, orderly: bool, silent: Iterable[str] = ()) -> None:
        """No process of the group is left on nodes that answer when it returns; a second call
        finishes what the first could not.

        Args:
            orderly: the workers may clean up before they go.
            silent: nodes that are not worth asking.
        """
        self._is_over.set()
        self._alarm.ring()  # for a thread that is in a step
        with contextlib.ExitStack() as stack:  # whatever one of these raises, the others are done
            stack.callback(self._alarm.close)
            if self._watch is not None:
                stack.callback(self._watch.wait)
            stack.callback(self._wait_for_end, silent)
            if self._exchange is not None:
                stack.callback(self._exchange.close)
            stack.callback(self._kill)
            if orderly and self.loss is None and ray.is_initialized():
                self._let_workers_end(silent)

    def _let_workers_end(self, silent: Iterable[str]) -> None:
        refs = self._calls.start(lambda _, actor: actor.call.remote("shutdown", (), {}))
        with contextlib.suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_CALL_S)
        # A rank that the channel's end ends first would be reported as crashed.
        self._calls.kill()
        self._wait_for_end(silent)

    def _wait_for_end(self, silent: Iterable[str]) -> None:
        for node_id in {place.node_id for place in self.places} - set(silent):
            with contextlib.suppress(NodeSilentError):
                left = self._agents.ask(
                    node_id,
                    "wait_for_end",
                    self._processes_on(node_id),
                    _EXIT_S,
                    timeout_s=_EXIT_S + ANSWER_S,
                )
                if left:
                    logger.warning("on node %s these ranks do not end: %s", node_id, left)
