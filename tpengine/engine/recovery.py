"""What the engine does when a rank is lost: it gets a new group of ranks, and loses no request.

Where the memory of the lost rank can be trusted, `Executor.resume` replaces that rank alone and
sends the unanswered steps again: nothing is computed twice but these steps. It runs in a thread,
as `rebuild` does: an actor of Ray takes seconds to start.

Otherwise the group is made anew. The driver holds the tokens of every request up to the last step
that was answered. So whatever a request was doing, prefill or decode, a loss has one consequence
for it, in four stages:

1. `Recovery._begin_anew`: the unanswered steps did not happen. Every unfinished request waits
   again, with its prompt and its output tokens so far, and with nothing of that computed. Only a
   request that is found to be the cause of the losses fails (`poison_requests`).
2. A thread makes a new group of ranks. Meanwhile `LLMEngine.step` returns at once and reports
   nothing but aborts, so that requests can be added and aborted. An attempt that fails for what may
   pass (memory, files, ports, places) is repeated after a pause that grows.
3. `Recovery.go_on` sees that the group is ready: the scheduler gets an empty cache of its size.
4. The next steps compute prompt and output tokens of every request anew, and its stream continues
   with the next token.

Where each decision stands: when a silent rank is looked at, and the deadline of a step:
`executor/watch.py`; whether it is lost or only slow, and why: `executor/diagnosis.py`; which
request is at fault: `poison_requests.py`; where the new ranks run: `executor/home.py`.

If there is no room for all ranks, the new group may have fewer (`GroupSize`, `min_ranks`). Once
there is room again, a group with all of them takes its place, by the same stages.

If groups are lost too often in steps, or a lost one is not replaced in time, the engine is dead.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NoReturn

from tpengine import errors, host
from tpengine.config import EngineConfig
from tpengine.engine.group_size import GroupSize
from tpengine.engine.poison_requests import PoisonSearch
from tpengine.engine.startup import (
    check_cache_holds_one_sequence,
    count_blocks,
    make_block_manager,
)
from tpengine.engine.stats import EngineHealth, EngineState, RecoveryProgress, RecoveryRecord
from tpengine.errors import counted
from tpengine.executor.executor import Executor, pause_s
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import Request

logger = init_logger(__name__)

_WAIT_S = 0.02
"""How long a step waits for a rebuild: its caller has other work to do."""
Ledgers = list[MemoryLedger]
_PROGRESS_LINE_S = 5.0
_CLOSE_S = 10.0
_THREAD = "tpengine-rebuild"
_NUM_RECORDS = 1000
_NUMBER = re.compile(r"\b[0-9a-f]*\d[0-9a-f]*\b")
"""Also in the form of Ray's names."""


class Recovery:
    """Notices that the group of ranks was lost, and has it rebuilt, or gives up.

    Attributes:
        state: of the engine; only this class changes it.
        records: of the latest recoveries.
        ledgers: memory of the present ranks, or of the last ones.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, scheduler: Scheduler, ledgers: Ledgers
    ) -> None:
        self._pid = os.getpid()
        self._config = config
        self._executor = executor
        self._scheduler = scheduler
        self.state = EngineState.RUNNING
        self.ledgers = ledgers
        self.records: deque[RecoveryRecord] = deque(maxlen=_NUM_RECORDS)
        self._num_recoveries = 0
        self._failure: BaseException | None = None
        self._poison = PoisonSearch()
        self._size = GroupSize(config, partial(_look_for_room, executor))
        self._loss: errors.RankLoss | None = None  # the latest
        # What is recovered from; None: the group was ended to get all ranks again.
        self._cause: errors.RankLoss | None = None
        self._loss_times: deque[float] = deque()  # of losses that count against the limit
        self._resumption: Future[str | None] | None = None  # None: none goes on
        self._rebuild: Future[Ledgers] | None = None  # None: between two attempts
        self._failed: list[Request] = []  # since the last `take_failed`
        self._num_attempts = 0
        self._reason = ""  # of the attempt that failed last, without its numbers
        self._lost_at = self._last_line_at = self._progress_at = time.monotonic()
        self._attempt_at = self._lost_at  # the next attempt begins then
        # Requests without a token since the loss, with the time of their last one.
        self._gaps: dict[str, tuple[Request, float]] = {}

    def check_alive(self) -> None:
        """Makes sure that the engine can still be used.

        Raises:
            EngineDeadError: it cannot; the message says why.
            EngineError: this process is a copy of the one that made the engine.
        """
        if os.getpid() != self._pid:
            raise errors.EngineError(
                f"process {self._pid} made this engine, and this is process {os.getpid()}: a "
                "forked process has no threads and ranks of its own; make an engine in it"
            )
        if self.state is not EngineState.DEAD:
            return
        if isinstance(self._failure, errors.EngineDeadError):
            raise errors.EngineDeadError(str(self._failure)) from self._failure
        text = f"a step failed ({type(self._failure).__name__}: {self._failure})"
        text = f"{text}, and the engine cannot go on; make a new one"
        raise errors.EngineDeadError(text) from self._failure

    def go_on(self) -> bool:
        """Looks at the group; returns whether a step can be scheduled now.

        Raises:
            EngineDeadError: the group was lost too often or cannot be replaced.
        """
        if self._resumption is not None:
            self._poll_resumption(self._resumption)
        elif self.state is EngineState.RECOVERING:
            self._poll_rebuild()
        if self.state is EngineState.RUNNING:
            loss = self._executor.loss
            if loss is not None:
                self.begin(loss)
            elif not self._poison.suspects and self._size.grow(time.monotonic()):
                self._begin_growth()
        if self.state is not EngineState.RUNNING:
            return False
        if self._poison.note_progress():
            self._scheduler.restrict(self._poison.allowed)
        return True

    def take_failed(self) -> list[Request]:
        """The requests that were found to be the cause of losses since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def begin(self, loss: errors.RankLoss) -> None:
        """Starts to have the lost rank replaced, or the group rebuilt.

        Raises:
            EngineDeadError: too many groups were lost lately.
        """
        self._pause()
        self._loss, self._cause, self._num_attempts = loss, loss, 1
        self._size.note_loss(self._lost_at)
        if self._poison.suspects:
            self._begin_anew(loss)
            return
        self._resumption = host.run_in_thread(self._executor.resume, _THREAD)
        self._poll_resumption(self._resumption)

    def _pause(self) -> None:
        """From now on there is no group for steps."""
        self._lost_at = self._last_line_at = time.monotonic()
        requests = self._scheduler.unfinished_requests()
        if not requests:
            self._progress_at = self._lost_at
        for request in requests:
            metrics = request.metrics
            if metrics.first_token_time is not None:
                self._gaps.setdefault(request.request_id, (request, metrics.last_token_time))
        self.state = EngineState.RECOVERING

    def _begin_growth(self) -> None:
        """Ends a group in good health for one with all ranks."""
        self._pause()
        self._cause, self._num_attempts = None, 0
        self._restart_requests()
        waiting = counted(len(self._scheduler.unfinished_requests()), "request")
        text = "there is room for all %d ranks again: %s will wait for the group that has them"
        logger.warning(text, self._size.num_wanted, waiting)
        self._start_rebuild()

    def _restart_requests(self) -> None:
        blocks = self._scheduler.block_manager
        num_blocks = blocks.num_total_blocks, blocks.host.num_blocks
        self._scheduler.restart(make_block_manager(self._config, *num_blocks))

    def _begin_anew(self, loss: errors.RankLoss) -> None:
        """Makes every unfinished request wait with the tokens that it has, fails the one that is
        the cause of the losses, if that is known now, and starts to rebuild the group."""
        self._num_attempts = 0
        requests, unanswered = self._scheduler.unfinished_requests(), self._scheduler.unanswered
        culprit, is_isolation_step = self._poison.note_loss(loss, unanswered, requests)
        self._restart_requests()
        self._size.note_loss(time.monotonic())
        if culprit is not None:
            reason = (
                f"request {culprit.request_id!r} was ended because it loses the engine's ranks: "
                "they were lost in steps that held it and others, and then twice while it ran "
                f"alone; the other requests go on. The last time: {loss.report()}"
            )
            logger.error("%s", reason)
            error = errors.RequestFailedError(reason)
            failed = self._scheduler.fail_request(culprit.request_id, error)
            if failed is not None:
                self._failed.append(failed)
        self._scheduler.restrict(self._poison.allowed)
        self._count_loss(loss, not is_isolation_step, "will wait for a new group of ranks")
        self._start_rebuild()

    def _poll_resumption(self, resumption: Future[str | None]) -> None:
        """Waits a moment for the lost rank to be replaced alone. If that cannot be, all begins
        anew."""
        assert self._loss is not None
        if not self._has_ended(resumption):
            return
        self._resumption = None
        error = resumption.exception()
        reason = resumption.result() if error is None else repr(error)
        if reason is None:
            self._count_loss(self._loss, True, "went on with a new rank in its place")
            self._note_ready(self._scheduler.block_manager.num_total_blocks, is_resumed=True)
            return
        text = "the memory of rank %d, which was lost, is not used: %s"
        logger.warning(text, self._loss.rank, reason)
        self._begin_anew(self._loss)

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be in flight now: one while requests are suspected, so that a loss is the
        loss of one step."""
        return 1 if self._poison.suspects else self._config.scheduler.max_steps_in_flight

    def note_arrival(self) -> None:
        """Notes that a request is about to be added: an idle engine has work from now on."""
        if self.state is EngineState.RUNNING and not self._scheduler.has_unfinished_requests():
            self._progress_at = time.monotonic()

    def note_step(self) -> None:
        """Notes that a step was completed."""
        self._poison.note_step()
        self._progress_at = time.monotonic()
        if not self._gaps or not self.records:
            return
        record = self.records[-1]
        for request_id, (request, last_token_at) in tuple(self._gaps.items()):
            latest = request.metrics.last_token_time
            if latest > last_token_at:
                record.longest_gap_s = max(record.longest_gap_s or 0.0, latest - last_token_at)
                del self._gaps[request_id]
            elif request.finished:
                del self._gaps[request_id]

    def health(self) -> EngineHealth:
        """Returns the engine's state at this moment; may be called from any thread."""
        now = time.monotonic()
        running = self.state is EngineState.RUNNING
        is_idle = running and not self._scheduler.has_unfinished_requests()
        return EngineHealth(
            state=self.state,
            epoch=self._executor.epoch,
            num_recoveries=self._num_recoveries,
            stalled_s=0.0 if is_idle else now - self._progress_at,
            failure=self._failure,
            recovery=self._progress(now),
            num_ranks=self._size.num_ranks,
            num_ranks_wanted=self._size.num_wanted,
        )

    def _progress(self, now: float) -> RecoveryProgress | None:
        cause, executor = self._cause, self._executor
        if self.state is not EngineState.RECOVERING:
            return None
        phases_s, elapsed_s = dict(executor.start_times_s), now - self._lost_at
        phase = executor.start_phase
        return RecoveryProgress(cause, elapsed_s, self._num_attempts, phases_s, phase)

    def die(self, error: BaseException) -> None:
        """Notes that the engine cannot go on."""
        self._failure = error  # first: another thread may see the state at once
        self.state = EngineState.DEAD

    def close(self) -> None:
        """Waits until no rank or group is being replaced, ten seconds at most; the executor was
        shut down before."""
        threads: list[Future[Any] | None] = [self._resumption, self._rebuild, self._size.look]
        if wait([work for work in threads if work is not None], _CLOSE_S).not_done:
            logger.warning("a rebuild did not end within %.0f s of the shutdown", _CLOSE_S)

    def _count_loss(self, loss: errors.RankLoss, counts: bool, outcome: str) -> None:
        """Notes the loss of a group that was ready.

        Args:
            counts: against the limit.
            outcome: what the unfinished requests do.

        Raises:
            EngineDeadError: too many were lost lately.
        """
        now, limits = time.monotonic(), self._config.recovery
        if counts:
            self._loss_times.append(now)
        while self._loss_times and self._loss_times[0] < now - limits.window_s:
            self._loss_times.popleft()
        if len(self._loss_times) > limits.max_recoveries:
            times = f"{counted(len(self._loss_times), 'time')} within {limits.window_s:g} s"
            limit = f"max_recoveries = {limits.max_recoveries}"
            text = f"its ranks were lost {times}, and {limit}. The last time: {loss.report()}"
            self._fail_engine(text, errors.GroupLostError(loss))
        waiting = counted(len(self._scheduler.unfinished_requests()), "request")
        count = f"{len(self._loss_times)} of {limits.max_recoveries} recoveries"
        text = f"{waiting} {outcome} ({count}"
        logger.error("%s\n%s within %g s)", loss.report(), text, limits.window_s)

    def _start_rebuild(self) -> None:
        """Starts a thread that makes a new group."""
        self._num_attempts += 1
        executor, size = self._executor, self._size
        num_ranks, is_smaller = size.num_ranks, size.is_smaller
        left_s = self._lost_at + self._config.recovery.timeout_s - time.monotonic()

        def rebuild() -> Ledgers:
            ledgers = executor.rebuild(num_ranks, left_s)
            num_blocks, num_host_blocks = count_blocks(ledgers)
            if is_smaller:
                check_cache_holds_one_sequence(self._config, num_blocks, ledgers)
            executor.init_cache_engine(num_blocks, num_host_blocks)
            return ledgers

        self._rebuild = host.run_in_thread(rebuild, _THREAD)

    def _poll_rebuild(self) -> None:
        """Waits a moment for the new group; once it is ready, requests can run again."""
        if self._rebuild is None:
            if time.monotonic() < self._attempt_at:
                time.sleep(_WAIT_S)
                return
            self._start_rebuild()
        assert self._rebuild is not None
        if not self._has_ended(self._rebuild):
            return
        rebuild, self._rebuild = self._rebuild, None
        try:
            ledgers = rebuild.result()
            blocks = make_block_manager(self._config, *count_blocks(ledgers))
        except Exception as error:
            self._note_failed_attempt(error)
            return
        num_blocks_before = self._scheduler.block_manager.num_total_blocks
        self._scheduler.restart(blocks)
        self.ledgers = ledgers
        self._note_ready(num_blocks_before, is_resumed=False)

    def _has_ended(self, attempt: Future[Any]) -> bool:
        """Waits a moment for an attempt at a rank or a group. Ends the engine if it hangs; else
        logs that it goes on."""
        if wait([attempt], _WAIT_S).done:
            return True
        now = time.monotonic()
        if now - self._lost_at > self._config.recovery.timeout_s:
            self._give_up(TimeoutError(f"attempt {self._num_attempts} hangs"))
        if now - self._last_line_at > _PROGRESS_LINE_S:
            self._last_line_at = now
            what = "rebuilding the group" if self._resumption is None else "replacing the rank"
            logger.warning("still %s, since %.1f s", what, now - self._lost_at)
        return False

    def _note_failed_attempt(self, error: Exception) -> None:
        """Plans the next attempt at a group, unless it would fail as this one has.

        Raises:
            EngineDeadError: it would, or the time for all attempts is up.
        """
        now, limit_s = time.monotonic(), self._config.recovery.timeout_s
        wait_s, size, before = pause_s(self._num_attempts), self._size, self._size.num_ranks
        is_hopeless = not (isinstance(error, errors.GroupLostError) or errors.is_temporary(error))
        if is_hopeless and not size.has_another_size:
            why = f"{type(error).__name__}: {error}{self._describe_loss()}"
            self._fail_engine(f"{self._describe_end()} and could not be replaced: {why}", error)
        size.change(now + wait_s, is_hopeless)
        if size.num_ranks < before:
            wait_s = 0.0
        if now + wait_s - self._lost_at > limit_s:
            self._give_up(error)
        self._attempt_at = now + wait_s
        logger.error(
            "attempt %d at a new group of ranks failed. The driver's machine: %s. The next attempt"
            "%s follows in %g s, the last one within %g s of the %s (recovery_timeout). %s",
            self._num_attempts,
            host.describe_resources(error),
            size.describe_lack(),
            wait_s,
            limit_s,
            "loss" if self._cause is not None else "end of the smaller group",
            self._new_reason(error),
        )

    def _new_reason(self, error: Exception) -> str:
        """Why an attempt failed. Only the first line if nothing but numbers differs from the
        attempt before: what Ray says of a rank that it does not start is long."""
        text = _describe(error)
        before, self._reason = self._reason, _NUMBER.sub("#", text)
        is_known = self._num_attempts > 1 and self._reason == before
        return text.partition("\n")[0] if is_known else text

    def _give_up(self, error: Exception) -> NoReturn:
        """Ends the engine, as the time for all attempts at a new group is up."""
        machine = f"the driver's machine: {host.describe_resources(error)}"
        limit = f"recovery_timeout = {self._config.recovery.timeout_s:g} s ({machine})"
        attempts = counted(self._num_attempts, "attempt")
        text = f"{self._describe_end()} and not replaced within {limit}, in {attempts}"
        last = f"{_describe(error)}{self._describe_loss()}"
        self._fail_engine(f"{text}. The last one: {last}", error)

    def _describe_end(self) -> str:
        if self._cause is not None:
            return "its ranks were lost"
        return f"its ranks were ended to get all {self._size.num_wanted} again"

    def _describe_loss(self) -> str:
        return "" if self._cause is None else f". What was lost: {self._cause.report()}"

    def _note_ready(self, num_blocks_before: int, is_resumed: bool) -> None:
        """Notes that steps can be sent again."""
        assert self._loss is not None
        num_blocks = self._scheduler.block_manager.num_total_blocks
        self.state = EngineState.RUNNING
        if not is_resumed:  # else the next search for room would be put off
            self._size.note_ready(time.monotonic())
        if self._cause is not None:
            self._num_recoveries += 1
        record = RecoveryRecord(
            epoch=self._executor.epoch,
            loss=self._loss,
            num_requests=len(self._scheduler.unfinished_requests()),
            num_attempts=self._num_attempts,
            ready_s=time.monotonic() - self._lost_at,
            phases_s=dict(self._executor.start_times_s),
            num_blocks=(num_blocks_before, num_blocks),
            is_resumed=is_resumed,
        )
        self.records.append(record)
        phases = ", ".join(f"{name} {spent:.2f}" for name, spent in record.phases_s.items())
        logger.warning(
            "the %s%s: epoch %d after %.2f s%s and %s; KV cache of %d blocks, "
            "%d before; %s can go on",
            "lost rank is replaced" if is_resumed else "group is rebuilt",
            self._size.describe_lack(),
            record.epoch,
            record.ready_s,
            f" ({phases})" if phases else "",
            counted(record.num_attempts, "attempt"),
            num_blocks,
            num_blocks_before,
            counted(record.num_requests, "request"),
        )

    def _fail_engine(self, reason: str, cause: Exception) -> NoReturn:
        """Ends the ranks and the engine.

        Raises:
            EngineDeadError: always.
        """
        error = errors.EngineDeadError(f"the engine cannot go on: {reason}")
        error.__cause__ = cause
        self.die(error)
        try:
            self._executor.shutdown()
        except Exception:  # the user is to see the error that ended the engine, not this one
            logger.exception("the ranks could not be ended in order")
        raise error


def _look_for_room(executor: Executor, num_more: int) -> Future[bool]:
    return host.run_in_thread(partial(executor.has_room, num_more), _THREAD)


def _describe(error: Exception) -> str:
    if isinstance(error, errors.GroupLostError):
        return error.loss.report()
    return f"{type(error).__name__}: {error}"
