"""The executor of ranks in processes of their own: how a group is started, replaced and ended.

Its `Home` says where the ranks run and starts their processes, as actors of Ray or as subprocesses
of the driver; another one may take over. Steps and calls go over the channels of the `Group`.

After the loss of a rank, `resume` replaces that one alone: the others stay, the new one maps the
memory that the lost one has left, all get the batch as it was after the last answered step, and the
unanswered steps again. Where that cannot be, `rebuild` ends the group as a whole and starts the
next one, whose ranks know nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpengine import host
from tpengine.config import EngineConfig
from tpengine.errors import (
    EngineError,
    GroupLostError,
    RankLoss,
    TemporaryError,
    WorkerDiedError,
    is_shortage,
)
from tpengine.executor.batch_mirror import BatchMirror
from tpengine.executor.codec import decode_output, encode
from tpengine.executor.diagnosis import RankPlace
from tpengine.executor.executor import Executor, pause_s
from tpengine.executor.group import Group
from tpengine.executor.home import PROCESSES, Home, Start
from tpengine.executor.watch import StepDeadline
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, StepInput, StepOutput
from tpengine.structured.grammars import Vocabulary

logger = init_logger(__name__)

_REFILL_S = 3.0
"""Until spares are started after a rebuild: their imports would delay the waiting requests."""
_REPLACE_S = 60.0
"""How long lost ranks may be replaced alone. Without a template a new rank imports first, and the
others may be in a step."""
_SHARE = 0.5
"""Of `recovery_timeout`, for an attempt after which there is another way."""
_TURN_S = 30.0
"""How long `shutdown` waits for a cancelled start to stop."""
_RESERVE, _RESERVE_PER_RANK = 32, 10
"""File descriptors for a rebuild in a driver that has none left, as in a server whose clients hold
them. A rank that starts takes 10: four ends of sockets, two of a pipe, its number and its files."""


class GroupExecutor(Executor):
    """Ranks in processes of their own.

    `load` starts the first group, and leaves nothing behind if that fails.

    Attributes:
        nodes: addresses; those of the last group while a new one starts.
        home: where the ranks run.
    """

    def __init__(self, config: EngineConfig, home: Home) -> None:
        super().__init__()
        self.home = home
        self._former_homes: list[Home] = []
        self._config = config
        self._limits = config.parallel.own_processes
        self._engine_id = uuid.uuid4().hex
        self._deadline = StepDeadline(self._limits.step_timeout_s)
        self._unanswered: deque[StepInput] = deque()
        self._mirror = BatchMirror()
        self._num_blocks = 0, 0
        self._has_grammars = False
        self._outlive = False
        self._group: Group | None = None
        self._start = Start(self._limits.start_timeout_s, self._check)
        self.start_times_s = self._start.seconds
        self._peaks: dict[int, list[int]] = {}  # by number of ranks, as the digests
        self._digests: dict[int, list[str]] = {}
        self.nodes = []
        self._turn = threading.Lock()
        self._is_cancelled = threading.Event()
        self._is_shut_down = False
        size = config.parallel.world_size
        self._reserve = host.FileReserve(_RESERVE + _RESERVE_PER_RANK * size)

    def _check(self) -> None:
        """Called during everything that may take long.

        Raises:
            EngineError: the executor is being shut down, or its home is gone.
        """
        if self._is_cancelled.is_set():
            raise EngineError("the engine is being shut down")
        self.home.check()

    @property
    def places(self) -> list[RankPlace]:
        """Where each rank of the latest group is or was, in rank order; empty before `load`."""
        return [] if self._group is None else list(self._group.places)

    @property
    def loss(self) -> RankLoss | None:
        """See `Executor`."""
        return None if self._group is None else self._group.loss

    @property
    def start_phase(self) -> str | None:
        """See `Executor`."""
        return self._start.phase_now

    @property
    def first_epoch(self) -> int:
        """See `Executor`."""
        return 1 if self._group is None else self._group.first_epoch

    def load(self) -> list[str]:
        """Places the ranks, starts and connects them, and loads the model.

        Raises:
            PlacementError: there is no room for the ranks.
            EngineError: a rank's own error; nothing is left behind.
        """
        limit_s, num_failed = self._limits.start_timeout_s, 0
        deadline = time.monotonic() + limit_s
        with self._in_turn():
            while True:
                try:
                    self._load_first()
                    self._hold_reserve()
                    return list(self.devices)
                except Exception as error:
                    num_failed += 1
                    wait_s = pause_s(num_failed)
                    if not is_shortage(error) or time.monotonic() + wait_s > deadline:
                        raise
                    logger.warning(
                        "the ranks were not started. The driver's machine: %s. The next attempt "
                        "follows in %g s, the last one within %g s (start_timeout_s). %s",
                        host.describe_resources(error),
                        wait_s,
                        limit_s,
                        error,
                    )
                self._is_cancelled.wait(wait_s)
                self._check()

    def _load_first(self) -> None:
        """Places and starts the first group, up to its loaded weights."""
        try:
            self.home.place(self._start)
            self._start_group(1)
            self._start.note_first()
            return
        except GroupLostError as error:
            self._end_group(orderly=False)
            failure = error.__cause__ or WorkerDiedError(error.loss.report())
        except BaseException:
            self._end_group(orderly=False)
            raise
        raise failure  # outside the `except` block, so that the rank's traceback stays its cause

    def resume(self) -> str | None:
        """See `Executor`."""
        lost = self._group
        if lost is None or lost.survivors is None:
            return "no rank was started" if lost is None else lost.why_given_up
        if (reason := self._why_not_kept(lost.survivors)) is not None:
            return reason
        try:
            with self._in_turn():
                self._start.seconds.clear()
                self._reserve.give_back()
                try:
                    self._replace_lost(lost)
                finally:
                    self._hold_reserve()
        except EngineError as error:  # `rebuild` finds out whether any ranks can be started
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            logger.exception("a lost rank was not replaced alone")
            return repr(error)
        self._fill_spares(_REFILL_S)
        return None

    def _why_not_kept(self, survivors: frozenset[int]) -> str | None:
        """Why what the ranks know is not all in their memory and in the batch; None: it is."""
        if not self._mirror.num_steps:
            return "no step was completed since the start, or since the last loss"
        if not self._outlive:
            return "not all that the ranks know is kept, see the log of their start"
        if self._config.model.pooling is not None:
            return "sums over a prompt end with their rank"
        if self._has_grammars and self._config.parallel.sampling_rank not in survivors:
            return "compiled grammars end with their rank"
        return None

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        """See `Executor`."""
        self._has_grammars = True
        super().load_vocabulary(vocabulary)

    def _fill_spares(self, delay_s: float) -> None:
        self.home.spares.fill([place.node_id for place in self.places], delay_s)

    def _replace_lost(self, lost: Group) -> None:
        """Starts another group that has the survivors of this one and the memory of its lost ranks,
        and sends again what was not answered."""
        unanswered = list(self._unanswered)
        limit_s = min(_REPLACE_S, _SHARE * self._config.recovery.timeout_s)
        self._start.deadline = time.monotonic() + limit_s
        self._start_group(lost.epoch + 1, lost)
        with self._start.phase("cache"):
            self._run_workers("init_cache_engine", *self._num_blocks, goes_on=True)
        with self._start.phase("batch"):
            batch = StepInput(0, [], [], new_sequences=self._mirror.sequences())
            self._send(batch)
            self._take(batch)
        self._start.deadline = math.inf
        self._mirror.num_steps = 0
        self._unanswered.extend(unanswered)
        for step in unanswered:
            self._send(step)

    def has_room(self, num_more: int) -> bool:
        """See `Executor`."""
        with self._in_turn():
            return self.home.has_room(num_more, self._check_search)

    def _check_search(self) -> None:
        """Ends a search for room when its turn is needed to replace a lost rank."""
        self._check()
        if self.loss is not None:
            raise TemporaryError(f"room was searched for, and rank {self.loss.rank} was lost")

    def rebuild(
        self, num_ranks: int | None = None, left_s: float | None = None
    ) -> list[MemoryLedger]:
        """See `Executor`.

        Raises:
            PlacementError: there is no room for the ranks without the nodes that were lost.
        """
        size = num_ranks or self._config.parallel.world_size
        fewest, self._start.deadline = self._config.parallel.min_ranks or size, math.inf
        if size > fewest:
            left_s = self._config.recovery.timeout_s if left_s is None else left_s
            self._start.deadline = time.monotonic() + _SHARE * left_s
        try:
            return self._rebuild(size)
        except EngineError as error:
            with self._in_turn():  # else a shutdown might not end what is made here
                home = self.home.successor(error)
                if home is None:
                    raise
                self._former_homes.append(self.home)
                self.home = home
        return self._rebuild(size)

    def _rebuild(self, size: int) -> list[MemoryLedger]:
        with self._in_turn():
            lost = self._group
            if lost is None:
                raise EngineError("no ranks were started: there is nothing to rebuild")
            self._start.seconds.clear()
            self._reserve.give_back()
            try:
                self.home.replace(size, lost, self._start)
                self._config = self._config.with_ranks(size)
                self._start_group(lost.epoch + 1)
                group = self._require_group()
                with self._start.phase("profile"):
                    known = self._peaks.get(size, [None] * size)
                    peaks = {rank: (peak,) for rank, peak in enumerate(known)}
                    ledgers = group.call_each("profile_num_available_blocks", peaks)
                self._start.deadline = math.inf
                return self._noted(ledgers)
            except BaseException as error:
                if not isinstance(error, GroupLostError) and self._group is not lost:
                    self._end_group(orderly=False)
                raise
            finally:
                self._hold_reserve()

    def _noted(self, ledgers: list[MemoryLedger]) -> list[MemoryLedger]:
        self._outlive = all(ledger.outlives for ledger in ledgers)
        self._peaks[len(ledgers)] = [ledger.activation_peak_bytes for ledger in ledgers]
        return ledgers

    def _hold_reserve(self) -> None:
        if not self._is_cancelled.is_set():  # `shutdown` may not have waited for its turn
            self._reserve.hold()

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """See `Executor`."""
        with self._start.phase("profile"):
            ledgers = self._noted(super().profile_num_available_blocks())
        worst = self._config.scheduler.max_num_batched_tokens
        self._deadline.observe(worst, self.start_times_s["profile"])
        return ledgers

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """See `Executor`; the last phase of a start."""
        self._num_blocks = num_blocks, num_host_blocks
        with self._in_turn():
            with self._start.phase("cache"):
                self._run_workers("init_cache_engine", *self._num_blocks)
            self._fill_spares(0.0 if self.epoch == 1 else _REFILL_S)

    def send_step(self, step: StepInput) -> None:
        """See `Executor`; over the channels."""
        self._unanswered.append(step)  # also if it cannot be sent: `resume` does it then
        self._send(step)

    def _send(self, step: StepInput) -> None:
        payloads = [encode(step)] * self._config.parallel.world_size
        if step.picture_loads:  # only rank 0 computes features
            loads = [replace(load, pixels=b"") for load in step.picture_loads]
            payloads[1:] = [encode(replace(step, picture_loads=loads))] * (len(payloads) - 1)
        deadline_s = self._deadline.of(step.num_tokens, step.num_awaited_rows)
        self._require_group().send_step(step.step, payloads, deadline_s)

    def take_answer(self) -> StepOutput:
        """See `Executor`."""
        step = self._unanswered[0]
        answer = self._take(step)
        assert answer.step == step.step, "the answer of another step"
        self._unanswered.popleft()
        self._mirror.follow(step, answer)
        return answer

    def _take(self, step: StepInput) -> StepOutput:
        deadline_s = self._deadline.of(step.num_tokens, step.num_awaited_rows)
        *earlier, last = self._require_group().take_answers(deadline_s)
        answer = decode_output(last)
        for stage in map(decode_output, earlier):
            answer.load_results.update(stage.load_results)
        self._deadline.observe(step.num_tokens, answer.model_s)
        return answer

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._require_group().call(method, *args, **kwargs)

    def _require_group(self) -> Group:
        if self._group is None or self._is_shut_down:
            raise EngineError("the engine was shut down; make a new one")
        return self._group

    def _start_group(self, epoch: int, lost: Group | None = None) -> None:
        """Starts the ranks up to their loaded weights.

        Args:
            lost: see `Group`; it is released once the new processes are there, and till then has
                its survivors hear of the driver.
        """
        self._unanswered.clear()
        if lost is None:
            self._mirror.clear()
            self._has_grammars = False
        phase = self._start.phase
        with phase(PROCESSES):
            self.home.prepare(None if lost is None else lost.survivors)
            try:
                group = Group(epoch, self._config, self._engine_id, self.home, self._start, lost)
            except BaseException:  # such as no descriptor; no group would end the processes
                self.home.kill()
                raise
            self._group, self.epoch = group, epoch
            try:
                group.start()
            finally:
                if lost is not None:
                    lost.release()
        with phase("channels"):
            group.join()
        with phase("imports"):
            group.create_workers()
        if len(group.places) > 1:
            with phase("rendezvous"):
                group.rendezvous()
        with phase("devices"):
            lines: list[str] = group.call("init_device")
        self.nodes = [place.address for place in group.places]
        self.devices = [
            f"{line} ({place})" for line, place in zip(lines, group.places, strict=True)
        ]
        with phase("weights"):
            size = len(group.places)
            self._digests[size] = group.load_model(self._digests.get(size))

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Lets one thread at a time start or end groups."""
        self._check()
        if not self._turn.acquire(timeout=_TURN_S):
            raise TemporaryError(
                f"another thread has been starting the ranks for {_TURN_S:g} s; wait for it"
            )
        try:
            self._check()
            yield
        finally:
            self._turn.release()

    def shutdown(self) -> None:
        """Ends the ranks and gives their places back; a second call does nothing, or finishes what
        an interrupted first one could not."""
        if self._is_shut_down:
            return
        self._is_cancelled.set()
        if self._group is not None:
            self._group.give_up()
        has_turn = self._turn.acquire(timeout=_TURN_S)
        try:
            if not has_turn:
                logger.warning("a start of ranks does not stop; its ranks are ended while it runs")
            with contextlib.ExitStack() as stack:  # each of these runs, even if another one raises
                for home in (*self._former_homes, self.home):
                    stack.callback(home.close)
                self._end_group(orderly=True)
            self._reserve.give_back()
            self._is_shut_down = True
        finally:
            if has_turn:
                self._turn.release()

    def _end_group(self, orderly: bool) -> None:
        """Ends all processes of the group and gives their places back.

        Args:
            orderly: the workers may clean up before they end.
        """
        try:
            if self._group is not None:
                self._group.end(orderly=orderly)
        finally:
            for home in (*self._former_homes, self.home):
                home.give_places_back()
