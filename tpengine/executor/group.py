"""The ranks of one epoch: their start, their calls and steps, their loss and their end.

A group knows no launcher: processes are started, called and killed through the `Launcher` that it
is given. Once one rank is lost, all are ended, and the group only tells why; the next epoch is
another `Group`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from tpengine import host
from tpengine.config import EngineConfig, RanksConfig
from tpengine.errors import (
    EngineError,
    GroupLostError,
    ModelLoadError,
    RankLoss,
    is_temporary,
)
from tpengine.executor.channel import Channel, ChannelError, ChannelTimeoutError, Entrance
from tpengine.executor.diagnosis import (
    ANSWER_S,
    IDLE,
    Diagnosis,
    Doing,
    Failure,
    NodeAgents,
    NodeSilentError,
    RankFailure,
    RankPlace,
    RanksFailedError,
)
from tpengine.executor.watch import FROZEN_S, RankWatch, StepExchange, WakeUp
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous

logger = init_logger(__name__)
Answer = TypeVar("Answer")

_OVER = "the engine was shut down; make a new one"
_CALL_GRACE_S = 1.0
"""How long the others are heard after the first failure of a call: that failure may be the
consequence of another rank's, which is heard of later."""
_CHECK_S = 0.2
"""Between two looks at whether a wait for answers still makes sense."""
_LOOK_S = 1.0
"""Between two looks at the processes of ranks that do not connect."""
_CONNECT_S = 30.0
_SHUTDOWN_CALL_S = 5.0
_EXIT_S = 2.0
"""How long a rank's process may take to end before it is killed by its number, and after."""
_DIAGNOSIS_S = 30.0
"""Longer than any diagnosis takes."""
_COLLECTIVE_SHARE = 0.8
"""A collective waits for this share of the least deadline of a step: 24 s if that is 30 s. So a
rank that waits for a stuck one fails before the driver's deadline, and names the stuck one."""


class Calls(Protocol):
    """Calls of ranks that run."""

    def wait(self, timeout_s: float) -> Mapping[int, Any]:
        """Waits for at least one answer; returns new ones by rank. An answer is a value, the
        rank's `RankFailure`, or a `ChannelError` for a rank that could not be called."""


class Launcher(Protocol):
    """Starts the processes of one group's ranks, and reaches them without the channels."""

    @property
    def agents(self) -> NodeAgents:
        """The agents of the ranks' nodes."""

    def start(self) -> Calls:
        """Starts the processes; each answers with its `RankPlace`, numbered in any order."""

    def order(self, places: Sequence[RankPlace]) -> list[RankPlace]:
        """Settles which process becomes which rank.

        Args:
            places: by the numbers of `start`.

        Returns:
            The places in rank order.
        """

    def listen(self, epoch: int) -> Entrance:
        """Lets the ranks connect by the channels of an epoch; called after `order`."""

    def call(
        self, method: str, args: Mapping[int, tuple[Any, ...]], kwargs: Mapping[str, Any]
    ) -> Calls:
        """Has ranks run `Rank.call`; `args` are by rank, `kwargs` the same for all."""

    def kill(self) -> None:
        """Ends all processes without waiting, also those that are stopped."""


def gather(
    calls: Calls, ranks: Collection[int], timeout_s: float, check: Callable[[], None]
) -> list[Any]:
    """Waits for the answers of ranks; returns them in the order of `ranks`.

    Args:
        check: called repeatedly while answers are missing; an exception of it ends the wait.

    Raises:
        RanksFailedError: a rank failed, is gone, or did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    while len(answers) < len(ranks) and (left_s := deadline - time.monotonic()) > 0.0:
        check()
        answers |= calls.wait(min(_CHECK_S, left_s))
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures:
            deadline = min(deadline, time.monotonic() + _CALL_GRACE_S)
    if not failures and len(answers) < len(ranks):
        reason = (
            f"no answer within {timeout_s:.0f} s: it is frozen, or its machine very slow "
            "(start_timeout_s bounds a first start; a later one has a multiple of the first)"
        )
        failures = {rank: ChannelTimeoutError(reason) for rank in ranks if rank not in answers}
    if failures:
        raise RanksFailedError(failures)
    return [answers[rank] for rank in ranks]


class Group:
    """The ranks of one epoch.

    Args:
        launcher: of this group alone.
        limits: of calls, except the start of the processes, and of steps.
        check_cancelled: called during everything that may take long; an exception of it ends the
            wait.

    Attributes:
        places: where each rank is, in rank order; empty before `start`.
        loss: the rank that was lost; None: no rank was lost.
    """

    def __init__(
        self,
        epoch: int,
        config: EngineConfig,
        launcher: Launcher,
        limits: RanksConfig,
        check_cancelled: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.places: list[RankPlace] = []
        self.loss: RankLoss | None = None
        self._config = config
        self._launcher = launcher
        self._agents = launcher.agents
        self._start_timeout_s = limits.start_timeout_s
        self._step_timeout_s = limits.step_timeout_s
        self._check_cancelled = check_cancelled
        self._size = config.parallel.tensor_parallel_size
        self._diagnosis = Diagnosis(self._agents, epoch, [])
        self._exchange: StepExchange | None = None
        self._watch: RankWatch | None = None
        self._doing = IDLE
        self._diagnosing = threading.Lock()
        self._is_over = threading.Event()
        self._wake_up = WakeUp()

    @property
    def is_over(self) -> bool:
        """Whether the group was lost or ended."""
        return self.loss is not None or self._is_over.is_set()

    def start(self, timeout_s: float) -> None:
        """Starts the processes of the ranks.

        Args:
            timeout_s: for them to tell where they are. Until then a process that does not answer
                cannot be looked at.
        """
        found: list[RankPlace] = self._settled(
            Doing("start"),
            lambda: gather(self._launcher.start(), range(self._size), timeout_s, self._check_alive),
        )
        self.places = self._launcher.order(found)
        self._diagnosis = Diagnosis(self._agents, self.epoch, self.places)
        self._agents.open(place.node_id for place in self.places)
        for node_id in {place.node_id for place in self.places}:
            self._agents.tell(node_id, "watch", self._processes_on(node_id))
        places = (f"rank {rank} on {place}" for rank, place in enumerate(self.places))
        logger.info("%s", "; ".join(places))

    def open_channels(self) -> None:
        """Connects every rank by two channels, for steps and for heartbeats, and starts the
        watch."""
        channels = self._settled(Doing("join"), self._accept)
        self._exchange = StepExchange(channels[0::2], self.epoch, self._wake_up)
        self._watch = RankWatch(channels[1::2], self._is_frozen, self._on_loss)
        self._watch.start()

    def _accept(self) -> list[Channel]:
        """Has all ranks connect. A rank that fails, dies or is stopped meanwhile is noticed."""
        wait_s = min(_CONNECT_S, self._start_timeout_s)
        entrance = self._launcher.listen(self.epoch)
        start = time.monotonic()
        look_at = start + FROZEN_S
        missing = set(range(self._size))

        def check() -> None:
            nonlocal look_at
            self._check_alive()
            answers = calls.wait(0.0)
            missing.difference_update(answers)
            if failures := {r: a for r, a in answers.items() if isinstance(a, Failure)}:
                raise RanksFailedError(failures)
            if time.monotonic() < look_at:
                return
            for rank in missing:
                silent_s = time.monotonic() - start
                if self._diagnosis.is_frozen(rank, silent_s, may_hold=True):
                    silent = ChannelTimeoutError(f"silent for {silent_s:.1f} s")
                    raise RanksFailedError({rank: silent})
            look_at = time.monotonic() + _LOOK_S

        with contextlib.closing(entrance):
            args = [(rank, self.epoch, entrance.invitation, wait_s) for rank in range(self._size)]
            calls = self._launcher.call("join", dict(enumerate(args)), {})
            try:
                channels = entrance.accept(self._size, wait_s, check, per_rank=2)
            except ChannelTimeoutError as error:  # a rank that has connected has answered
                raise RanksFailedError(dict.fromkeys(missing, error)) from error
        gather(calls, missing, self._start_timeout_s, self._check_alive)
        logger.debug("channels to the ranks by %s", entrance)
        return channels

    def create_workers(self) -> None:
        """Has every rank make its worker, which imports torch."""
        configs = {rank: (self._config.for_rank(rank),) for rank in range(self._size)}
        self.call_each("create", configs)

    def rendezvous(self, engine_id: str) -> None:
        """Connects the ranks with each other.

        Args:
            engine_id: unique to the engine.
        """
        addresses = [place.address for place in self.places]
        if len({place.node_id for place in self.places}) == 1:
            addresses = [host.LOOPBACK] * self._size
        [port] = self.call_each("open_rendezvous", {0: (addresses[0],)})
        rendezvous = Rendezvous(
            engine_id=engine_id,
            epoch=self.epoch,
            addresses=addresses,
            port=port,
            connect_timeout_s=min(60.0, self._start_timeout_s),
            collective_timeout_s=_COLLECTIVE_SHARE * self._step_timeout_s,
        )
        logger.info("%s", "; ".join(self.call("connect", rendezvous)))

    def load_model(self, known: list[str] | None) -> list[str]:
        """Has every rank load its weights; returns their digests in rank order.

        Args:
            known: digests of the engine's first group; None: this is the first.

        Raises:
            ModelLoadError: they are other weights, with which no request can go on.
        """
        digests = self.call("load_model")
        if known is not None and digests != known:
            raise ModelLoadError(
                f"the weights in {self._config.model.model} are no longer those that the engine "
                "was started with, so that its requests cannot go on; start it again"
            )
        return digests

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every worker; returns the answers in rank order.

        Raises:
            GroupLostError: a rank was lost.
            EngineError: a rank's own exception.
        """
        return self.call_each(method, dict.fromkeys(range(self._size), args), **kwargs)

    def call_each(
        self, method: str, args: Mapping[int, tuple[Any, ...]], **kwargs: Any
    ) -> list[Any]:
        """Calls a method of those workers that `args` names, each with its own arguments."""
        return self._settled(
            Doing(method),
            lambda: gather(
                self._launcher.call(method, args, kwargs),
                args.keys(),
                self._start_timeout_s,
                self._check_alive,
            ),
        )

    def _settled(self, doing: Doing, run: Callable[[], Answer]) -> Answer:
        """Returns what `run` returns. If a rank fails in it, either the group is lost, or the
        rank's exception is raised because another start would fail in the same way."""
        with self._during(doing):
            try:
                return run()
            except RanksFailedError as error:
                rank = error.cause
                failure = error.failures[rank]
            except Exception as error:
                if not is_temporary(error):
                    raise
                reason = f"the driver could not call it: {type(error).__name__}: {error}"
                raise self._end_as_lost(0, ChannelError(reason), doing) from error
        if (
            isinstance(failure, RankFailure)
            and not failure.is_consequence
            and (failure.is_permanent or self.epoch == 1)
        ):
            raise failure.to_error()
        raise self._end_as_lost(rank, failure, doing)

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
            except RanksFailedError as error:
                raise self._end_as_lost(error.cause, error.failures[error.cause], doing) from None
            except BaseException as error:  # the ranks may have run the step: they are ahead
                reason = f"step {number} was interrupted at the driver: {error!r}"
                self._end_as_lost(0, ChannelError(reason), doing)
                raise  # the interruption itself, not the loss that it causes

    @contextlib.contextmanager
    def _during(self, doing: Doing) -> Iterator[None]:
        self._check_alive()
        self._doing = doing
        try:
            yield
        finally:
            self._doing = IDLE

    def _check_alive(self) -> None:
        """Raises an error if the start was cancelled, or the group is lost or ended."""
        self._check_cancelled()
        if self.loss is not None:
            raise GroupLostError(self.loss)
        if self._is_over.is_set():
            raise EngineError(_OVER)

    def _is_frozen(self, rank: int, silent_s: float) -> bool:
        # torch's libraries are loaded under Python's lock, from a disk that may be far away.
        return self._diagnosis.is_frozen(rank, silent_s, may_hold=self._doing.phase == "create")

    def _on_loss(self, rank: int, failure: ChannelError) -> None:
        self._end_as_lost(rank, failure, self._doing)

    def _end_as_lost(
        self, rank: int, failure: Failure, doing: Doing
    ) -> GroupLostError | EngineError:
        """Finds out why a rank was lost, and kills all ranks; returns the error for the caller to
        raise. If another thread has noticed a loss first, only returns the error of that one."""
        if not self._diagnosing.acquire(timeout=_DIAGNOSIS_S):
            return EngineError(f"no diagnosis of lost ranks within {_DIAGNOSIS_S:g} s")
        try:
            if self.loss is None:
                if self._is_over.is_set():
                    return EngineError(_OVER)
                loss = self._unexplained(rank, failure, doing)
                try:
                    loss = self._explain(rank, failure, doing)
                    self._kill()
                except Exception as why:  # no thread or memory is left; `end` kills them again
                    logger.warning("lost ranks were not killed at once: %r", why)
                self.loss = loss
                self._wake_up.set()
        finally:
            self._diagnosing.release()
        error = GroupLostError(self.loss)
        if isinstance(failure, RankFailure):
            error.__cause__ = failure.to_error()
        return error

    def _explain(self, rank: int, failure: Failure, doing: Doing) -> RankLoss:
        if self.places:
            last_phase = "" if self._watch is None else self._watch.phases[rank]
            return self._diagnosis.explain(rank, failure, doing, last_phase)
        return self._unexplained(rank, failure, doing)

    def _unexplained(self, rank: int, failure: Failure, doing: Doing) -> RankLoss:
        place = f"process {rank} that has not told where it is"
        if self.places:
            place = str(self.places[rank])
        return RankLoss(rank, place, self.epoch, doing.step, doing.phase, str(failure))

    def _processes_on(self, node_id: str) -> list[tuple[int, int]]:
        return [place.process for place in self.places if place.node_id == node_id]

    def _kill(self) -> None:
        """Ends every rank at once, also one that is stopped."""
        if self._watch is not None:
            self._watch.stop()
        for place in self.places:
            self._agents.tell(place.node_id, "signal", place.process, signal.SIGKILL)
        self._launcher.kill()

    def end(self, orderly: bool, silent: Iterable[str] = ()) -> None:
        """Ends all processes of the group on nodes that answer; a second call finishes what the
        first could not.

        Args:
            orderly: the workers may clean up before they end.
            silent: nodes that are not asked, as they do not answer.
        """
        self._is_over.set()
        self._wake_up.set()  # for a thread that is in a step
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._wake_up.close)
            if self._watch is not None:
                stack.callback(self._watch.wait)
            stack.callback(self._wait_for_end, silent)
            if self._exchange is not None:
                stack.callback(self._exchange.close)
            stack.callback(self._kill)
            if orderly and self.loss is None and self.places:
                self._let_workers_end(silent)

    def _let_workers_end(self, silent: Iterable[str]) -> None:
        ranks = range(self._size)
        calls = self._launcher.call("shutdown", dict.fromkeys(ranks, ()), {})
        with contextlib.suppress(RanksFailedError):
            gather(calls, ranks, _SHUTDOWN_CALL_S, lambda: None)
        # Before the channels close: a rank that ends itself for that would be reported as crashed.
        self._launcher.kill()
        self._wait_for_end(silent, is_last=False)

    def _wait_for_end(self, silent: Iterable[str], is_last: bool = True) -> None:
        for node_id in {place.node_id for place in self.places} - set(silent):
            with contextlib.suppress(NodeSilentError):
                ranks = self._processes_on(node_id)
                left = self._agents.ask(
                    node_id, "wait_for_end", ranks, _EXIT_S, timeout_s=_EXIT_S + ANSWER_S
                )
                if left and is_last:
                    logger.warning("on node %s these ranks do not end: %s", node_id, left)
