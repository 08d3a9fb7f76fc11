"""The ranks of one epoch: their start, their calls and steps, their loss and their end.

A group knows no launcher: processes are started, connected and killed through the `Home` that it
is given; all steps and calls are frames on the channels. Once a rank is lost, no step can be
completed, and the group only tells why; the next epoch is another `Group`. It may have the other
ranks as they are, if what the lost one has left in its memory can be trusted; else all are ended.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tpengine import host
from tpengine.config import EngineConfig
from tpengine.errors import EngineError, GroupLostError, ModelLoadError, RankLoss, is_temporary
from tpengine.executor import diagnosis
from tpengine.executor.channel import Channel, ChannelError
from tpengine.executor.codec import decode_call, encode_call
from tpengine.executor.home import Home, Start
from tpengine.executor.watch import Exchange, RankWatch, WakeUp
from tpengine.logger import init_logger
from tpengine.messages import Rendezvous

logger = init_logger(__name__)
Answer = TypeVar("Answer")

_OVER = "the engine was shut down; make a new one"
_SHUTDOWN_CALL_S = 5.0
_EXIT_S = 2.0
"""How long a rank's process may take to end before it is killed by its number, and after."""
_DIAGNOSIS_S = 30.0
"""Longer than any diagnosis takes."""
_COLLECTIVE_SHARE = 0.8
"""A collective waits for this share of the least deadline of a step: 24 s if that is 30 s. So a
rank that waits for a stuck one fails before the driver's deadline, and names the stuck one."""


class Group:
    """The ranks of one epoch.

    Args:
        engine_id: unique to the engine.
        home: where the processes of the ranks are prepared.
        start: says how long the waits for ranks may take, and whether they still make sense.
        lost: the group before, whose survivors go on as they are; None: all begin anew.

    Attributes:
        places: where each rank is, in rank order; before `start`, those of `lost`.
        first_epoch: in which the ranks' memory began.
        loss: the rank that was lost; None: no rank was lost.
        survivors: once a rank was lost, the ranks that another group may keep beside the memory of
            the lost ones; None: all begins anew.
        why_given_up: then the reason.
    """

    def __init__(
        self,
        epoch: int,
        config: EngineConfig,
        engine_id: str,
        home: Home,
        start: Start,
        lost: Group | None = None,
    ) -> None:
        self.epoch = epoch
        self.first_epoch: int = epoch if lost is None else lost.first_epoch
        self.places: list[diagnosis.RankPlace] = [] if lost is None else list(lost.places)
        self.loss: RankLoss | None = None
        self.survivors: frozenset[int] | None = None
        self.why_given_up = ""
        kept = frozenset() if lost is None else lost.survivors or frozenset()
        self._new = [rank for rank in range(config.parallel.world_size) if rank not in kept]
        self._keeps_memory = False  # before it is known
        self._config = config
        self._engine_id = engine_id
        self._home = home
        self._agents = home.agents
        self._start = start
        self._limits = config.parallel.own_processes
        self._size = config.parallel.world_size
        self._diagnosis = diagnosis.Diagnosis(self._agents, epoch, [])
        self._channels: list[Sequence[Channel]] = [] if lost is None else list(lost._channels)
        self._exchange: Exchange | None = None
        self._watch: RankWatch | None = None
        self._calling: diagnosis.Doing | None = None
        self._unanswered: deque[int] = deque()  # numbers of steps
        self._diagnosing = threading.Lock()
        self._is_over = threading.Event()
        self._wake_up = WakeUp()

    def start(self) -> None:
        """Starts the processes of the ranks."""
        limit_s = self._start.at_most(self._start.appear_s)
        start = partial(self._home.start, self.epoch, limit_s, self._check_alive)
        processes = self._settled(diagnosis.START, start)
        self.places = [place for place, _ in processes]
        self._channels = [channels for _, channels in processes]
        self._diagnosis = diagnosis.Diagnosis(self._agents, self.epoch, self.places)
        self._agents.open(place.node_id for place in self.places)
        for node_id in {place.node_id for place in self.places}:
            self._agents.tell(node_id, "watch", self._processes_on(node_id))
        places = (f"rank {rank} on {place}" for rank, place in enumerate(self.places))
        logger.info("%s", "; ".join(places))

    def join(self) -> None:
        """Makes each process a rank, and starts the watch. New processes of the driver import
        first."""
        self._settled(diagnosis.Doing("join"), self._join)

    def _join(self) -> None:
        self._exchange = exchange = Exchange([steps for steps, _ in self._channels], self._wake_up)
        heartbeats = [control for _, control in self._channels]
        self._watch = RankWatch(heartbeats, self._is_frozen, self._on_loss)
        host.start_thread(self._watch)
        payloads = {
            rank: encode_call(("join", (rank, self.places[rank]), {})) for rank in self._new
        }
        exchange.call(payloads, self._start.at_most(self._start.appear_s))

    def create_workers(self) -> None:
        """Has every new rank make its worker, which imports torch.

        Raises:
            EngineError: one that replaces a lost rank does not find what that one has left.
        """
        args = {rank: (self._config.for_rank(rank), self._memory_of(rank)) for rank in self._new}
        self._keeps_memory = all(self.call_each("create", args))
        if self.first_epoch != self.epoch and not self._keeps_memory:
            raise EngineError("the memory of the lost rank is not found on its node")

    def _memory_of(self, rank: int) -> diagnosis.KeptMemory | None:
        """Has the node of a rank hold its memory; returns where it is."""
        if not self._home.keeps_memory or self._limits.keep_kv == "never":
            return None
        self._start.check()
        node_id, limit_s = self.places[rank].node_id, diagnosis.AGENT_START_S
        is_new = self.first_epoch == self.epoch
        try:
            asked = rank, is_new, self._config.device == "cuda"
            place = self._agents.ask(node_id, "keep_memory", *asked, timeout_s=limit_s)
        except diagnosis.NodeSilentError as error:
            logger.warning("what rank %d holds ends with its process: %s", rank, error)
            return None
        if place is None:
            return None
        path, target = place
        return diagnosis.KeptMemory(path, target, self._engine_id, self.first_epoch)

    def rendezvous(self) -> None:
        """Connects the ranks with each other."""
        addresses = [place.address for place in self.places]
        if len({place.node_id for place in self.places}) == 1:
            addresses = [host.LOOPBACK] * self._size
        [port] = self.call_each("open_rendezvous", {0: (addresses[0],)})
        rendezvous = Rendezvous(
            engine_id=self._engine_id,
            epoch=self.epoch,
            addresses=addresses,
            port=port,
            connect_timeout_s=min(60.0, self._limits.start_timeout_s),
            collective_timeout_s=_COLLECTIVE_SHARE * self._limits.step_timeout_s,
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
        if self._config.model.calibrates:
            digests = self.call("calibrate")
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
        exchange = self._exchange
        assert exchange is not None, f"{method} before the ranks have joined"
        payloads = {rank: encode_call((method, own, kwargs)) for rank, own in args.items()}
        call = partial(exchange.call, payloads, self._start.at_most(self._limits.start_timeout_s))
        answers = self._settled(diagnosis.Doing(method), call)
        return [decode_call(answer) for answer in answers]

    def _settled(self, doing: diagnosis.Doing, run: Callable[[], Answer]) -> Answer:
        """Returns what `run` returns. If a rank fails in it, either the group is lost, or the
        rank's exception is raised because another start would fail in the same way."""
        self._check_alive()
        self._calling = doing
        try:
            return run()
        except diagnosis.RanksFailedError as error:
            rank = error.cause
            failure = error.failures[rank]
        except Exception as error:
            if not is_temporary(error):
                raise
            reason = f"the driver could not call it: {type(error).__name__}: {error}"
            raise self._end_as_lost(0, ChannelError(reason), doing) from error
        finally:
            self._calling = None
        if (
            isinstance(failure, diagnosis.RankFailure)
            and not failure.is_consequence
            and (failure.is_permanent or self.epoch == 1)
        ):
            raise failure.to_error()
        raise self._end_as_lost(rank, failure, doing)

    def send_step(self, number: int, payloads: Sequence[bytes], timeout_s: float) -> None:
        """Has every rank run a step, after those that were sent before. See `Exchange.send_step`.

        Raises:
            GroupLostError: a rank was lost.
        """
        self._check_alive()
        self._unanswered.append(number)
        with self._in_step() as exchange:
            exchange.send_step(number, payloads, timeout_s)

    def take_answers(self, timeout_s: float) -> list[bytes]:
        """Waits for the oldest step without an answer; returns the answer of the first rank of each
        stage. The last of them samples.

        Raises:
            GroupLostError: a rank was lost.
        """
        self._check_alive()
        with self._in_step() as exchange:
            answers = exchange.take_answers(self._unanswered[0], self._start.at_most(timeout_s))
            self._unanswered.popleft()
        return answers[:: self._config.parallel.tensor_parallel_size]

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[Exchange]:
        assert self._exchange is not None, "a step before the ranks have joined"
        doing = self._doing
        try:
            yield self._exchange
        except diagnosis.RanksFailedError as error:
            raise self._end_as_lost(error.cause, error.failures[error.cause], doing) from None
        except BaseException as error:  # the ranks may have run the step: they are ahead
            reason = f"step {doing.step} was interrupted at the driver: {error!r}"
            self._end_as_lost(0, ChannelError(reason), doing)
            raise  # the interruption itself, not the loss that it causes

    @property
    def _doing(self) -> diagnosis.Doing:
        """What the ranks do now: a call, or the oldest step without an answer."""
        if self._calling is not None:
            return self._calling
        with contextlib.suppress(IndexError):  # the watch asks too, while another thread takes one
            return diagnosis.Doing("execute_model", self._unanswered[0])
        return diagnosis.IDLE

    def _check_alive(self) -> None:
        """Raises an error if the start was cancelled, or the group is lost or ended."""
        self._start.check()
        if self.loss is not None:
            raise GroupLostError(self.loss)
        if self._is_over.is_set():
            raise EngineError(_OVER)

    def _is_frozen(self, rank: int, silent_s: float) -> bool:
        # Python starts, and torch's libraries are loaded under its lock, from a disk that may be
        # far away.
        may_hold = self._doing.phase in ("join", "create")
        return self._diagnosis.is_frozen(rank, silent_s, may_hold)

    def _on_loss(self, rank: int, failure: ChannelError) -> bool:
        self._end_as_lost(rank, failure, self._doing)
        return self.survivors is not None

    def _end_as_lost(
        self, rank: int, failure: diagnosis.Failure, doing: diagnosis.Doing
    ) -> GroupLostError | EngineError:
        """Finds out why a rank was lost, and kills it, and the others if they are of no use any
        more; returns the error for the caller to raise. If another thread has noticed a loss first,
        only returns the error of that one."""
        if not self._diagnosing.acquire(timeout=_DIAGNOSIS_S):
            return EngineError(f"no diagnosis of lost ranks within {_DIAGNOSIS_S:g} s")
        try:
            if self.loss is None:
                if self._is_over.is_set():
                    return EngineError(_OVER)
                loss = self._diagnosis.loss_of(rank, doing, str(failure))
                try:
                    last_phase = "" if self._watch is None else self._watch.phases[rank]
                    loss = self._diagnosis.explain(rank, failure, doing, last_phase)
                    self._part(loss, failure, doing)
                except Exception as why:  # no thread or memory is left; `end` kills them again
                    self.why_given_up = f"lost ranks were not killed at once: {why!r}"
                    logger.warning("lost ranks were not killed at once: %r", why)
                self.loss = loss
                self._wake_up.set()
        finally:
            self._diagnosing.release()
        error = GroupLostError(self.loss)
        if isinstance(failure, diagnosis.RankFailure):
            error.__cause__ = failure.to_error()
        return error

    def _part(self, loss: RankLoss, failure: diagnosis.Failure, doing: diagnosis.Doing) -> None:
        """Kills the lost ranks, and finds out whether the others can go on."""
        raised = isinstance(failure, diagnosis.RankFailure) and not failure.is_consequence
        if self._limits.keep_kv == "never":
            self.why_given_up = "keep_kv is never"
        elif raised or doing.phase not in ("execute_model", diagnosis.IDLE.phase):
            self.why_given_up = "it raised an error" if raised else f"it failed in {doing.phase}"
        elif not self._keeps_memory:
            self.why_given_up = "their memory ends with their processes"
        if self.why_given_up:
            self._kill()
            return
        assert self._watch is not None, "a step before the ranks have joined"
        self._watch.keep_alive()  # the others end themselves if they hear nothing
        lost = self._diagnosis.kill_lost(loss.rank)
        broken = [rank for rank in lost if self._diagnosis.has_broken_code(rank)]
        if broken and self._limits.keep_kv == "safe":
            ranks = ", ".join(map(str, broken))
            self.why_given_up = (
                f"the code of rank {ranks} was broken, or the kernel does not tell (of an actor of "
                "Ray before Linux 6.15); keep_kv is safe"
            )
            self._kill()
        else:
            self.survivors = frozenset(range(self._size)) - lost

    def release(self) -> None:
        """Lets go of the ranks that another group keeps; the lost ones are dead."""
        self.give_up()
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._close_channels, self.survivors or frozenset())
            stack.callback(self._wake_up.close)
            if self._watch is not None:
                self._watch.stop()
                self._watch.wait()

    def _close_channels(self, but: frozenset[int] = frozenset()) -> None:
        for rank, channels in enumerate(self._channels):
            for channel in channels if rank not in but else ():
                channel.close()

    def _processes_on(self, node_id: str) -> list[tuple[int, int]]:
        return [place.process for place in self.places if place.node_id == node_id]

    def _kill(self) -> None:
        """Ends every rank at once, also one that is stopped."""
        self.survivors = None
        if self._watch is not None:
            self._watch.stop()
        for _, control in self._channels:  # the ranks notice it
            control.close()
        for place in self.places:
            self._agents.tell(place.node_id, "signal", place.process, signal.SIGKILL)
        for node_id in {place.node_id for place in self.places}:
            self._agents.tell(node_id, "free_memory")
        self._home.kill()

    def give_up(self) -> None:
        """Ends the wait of a thread that is in a step or a call, now or later."""
        self._is_over.set()
        self._wake_up.set()

    def end(self, silent: Iterable[str] = (), orderly: bool = False) -> None:
        """Ends all processes of the group on nodes that answer; a second call finishes what the
        first could not.

        Args:
            silent: nodes that are not asked, as they do not answer.
            orderly: the workers may clean up before they end.
        """
        self.give_up()
        with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
            stack.callback(self._wake_up.close)
            if self._watch is not None:
                stack.callback(self._watch.wait)
            stack.callback(self._wait_for_end, silent)
            stack.callback(self._close_channels)
            stack.callback(self._kill)
            if orderly and self.loss is None and self._exchange is not None:
                self._let_workers_end(self._exchange, silent)

    def _let_workers_end(self, exchange: Exchange, silent: Iterable[str]) -> None:
        payloads = dict.fromkeys(range(self._size), encode_call(("shutdown", (), {})))
        with contextlib.suppress(diagnosis.RanksFailedError):
            exchange.call(payloads, _SHUTDOWN_CALL_S, is_last=True)
        # Before the channels close: a rank that ends itself for that would be reported as crashed.
        self._home.kill()
        self._wait_for_end(silent, is_last=False)

    def _wait_for_end(self, silent: Iterable[str], is_last: bool = True) -> None:
        for node_id in {place.node_id for place in self.places} - set(silent):
            with contextlib.suppress(diagnosis.NodeSilentError):
                ranks = self._processes_on(node_id)
                left = self._agents.ask(
                    node_id, "wait_for_end", ranks, _EXIT_S, timeout_s=_EXIT_S + diagnosis.ANSWER_S
                )
                if left and is_last:
                    logger.warning("on node %s these ranks do not end: %s", node_id, left)
