"""What an engine does when a rank dies: a new group, and nothing that a request had is lost.

The driver's sequences are the journal. Whatever ranks knew is in them up to the last step that was
answered, so after a loss all requests simply wait, as prompt and tokens so far, for ranks that know
nothing. Those are made in a thread of its own, so that requests come and go meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NoReturn

from tpengine.config import EngineConfig
from tpengine.engine.health import EngineHealth, EngineState, RecoveryRecord
from tpengine.engine.poison_requests import Blame, Verdict
from tpengine.engine.startup import count_blocks, make_block_manager
from tpengine.errors import EngineDeadError, GroupLostError, RankLoss, counted
from tpengine.executor.executor import Executor
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.step import SchedulerOutput
from tpengine.sequence import Request

logger = init_logger(__name__)

_WAIT_S = 0.02
"""For a rebuild, in each step: whoever steps has other things to do too."""
_PROGRESS_LINE_S = 5.0
_CLOSE_S = 10.0
_NUM_RECORDS = 1000


class _Rebuild:
    """One attempt at a new group, in a thread of its own."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._outcome: list[MemoryLedger] | BaseException
        # A daemon: a process that ends in the middle of it does not wait for the ranks.
        self._thread = threading.Thread(target=self._run, name="tpengine-rebuild", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            ledgers = self._executor.rebuild()
            self._executor.init_cache_engine(*count_blocks(ledgers))
            self._outcome = ledgers
        except BaseException as error:
            self._outcome = error

    def wait(self, timeout_s: float) -> bool:
        """Returns whether it is over."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> list[MemoryLedger]:
        """The new ranks' memory, or whatever error there was instead."""
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class Recovery:
    """Watches over the group of ranks: notices its loss, has it rebuilt, gives up in the end.

    Attributes:
        state: only this class changes it.
        num_recoveries: groups that were rebuilt.
        records: of the latest of them.
        ledgers: memory of the ranks that there are, or were last.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        scheduler: Scheduler,
        ledgers: list[MemoryLedger],
    ) -> None:
        self._config = config
        self._executor = executor
        self._scheduler = scheduler
        self.state = EngineState.RUNNING
        self.num_recoveries = 0
        self.ledgers = ledgers
        self.records: deque[RecoveryRecord] = deque(maxlen=_NUM_RECORDS)
        self._failure: BaseException | None = None
        self._blame = Blame()
        self._loss: RankLoss | None = None
        self._counted: deque[float] = deque()  # when losses that count against the limit came
        self._rebuild: _Rebuild | None = None
        self._num_attempts = 0
        self._lost_at = self._last_line_at = self._progress_at = time.monotonic()
        self._last_step_at: float | None = None
        # Requests that have not had a token since the loss, and when they had their last one.
        self._gaps: dict[str, tuple[Request, float]] = {}

    def check_alive(self) -> None:
        """Makes sure that the engine can still be used.

        Raises:
            EngineDeadError: it cannot, and why.
        """
        if self.state is not EngineState.DEAD:
            return
        if isinstance(self._failure, EngineDeadError):
            raise EngineDeadError(str(self._failure)) from self._failure
        raise EngineDeadError(
            f"a step failed ({type(self._failure).__name__}: {self._failure}), and the engine "
            "cannot go on; make a new one"
        ) from self._failure

    def go_on(self) -> bool:
        """Looks after the group; returns whether a step can be scheduled now.

        Raises:
            EngineDeadError: the group is lost for good.
        """
        if self.state is EngineState.RECOVERING:
            self._look_after_rebuild()
        if self.state is EngineState.RUNNING:
            loss = self._executor.loss
            if loss is not None:
                self.begin(loss)
        if self.state is not EngineState.RUNNING:
            return False
        if self._blame.has_suspects and self._blame.note_progress():
            self._scheduler.restrict(self._blame.allowed)
        return True

    def begin(self, loss: RankLoss, lost: SchedulerOutput | None = None) -> list[Request]:
        """Lets everything wait, and starts to rebuild the group.

        Args:
            lost: the step that was not answered, if one was sent.

        Returns:
            Requests that failed: without them the others would live.

        Raises:
            EngineDeadError: too many groups were lost lately.
        """
        self._lost_at = self._last_line_at = time.monotonic()
        self._num_attempts = 0
        requests = self._scheduler.unfinished_requests()
        if not requests:
            self._progress_at = self._lost_at
        for request in requests:
            told = request.metrics.last_token_time
            if told is not None:
                self._gaps.setdefault(request.request_id, (request, told))
        verdict = Verdict()
        # The loss may be older than the step that met it: what nobody has run is not to blame.
        if lost is not None and loss.step == lost.step_input.step:
            rows = {sequence.seq_id for sequence in lost.rows}
            present = [r for r in requests if any(s.seq_id in rows for s in r.sequences)]
            verdict = self._blame.note_loss(present, requests)
        blocks = self._scheduler.block_manager
        self._scheduler.restart(
            make_block_manager(self._config.cache, blocks.num_total_blocks, blocks.host.num_blocks)
        )
        failed = self._convict(verdict.convicted, loss)
        self._scheduler.restrict(self._blame.allowed)
        if self._blame.allowed is not None:
            logger.warning(
                "%d of %s may run while others wait: whether it is one of them that the ranks die "
                "of is being found out",
                len(self._blame.allowed),
                counted(len(requests), "request"),
            )
        self.state = EngineState.RECOVERING
        self._attempt(loss, counts=not verdict.is_probe)
        return failed

    def note_arrival(self) -> None:
        """Notes that a request is about to enter: an idle engine has something to do from now."""
        if self.state is EngineState.RUNNING and not self._scheduler.has_unfinished_requests():
            self._progress_at = time.monotonic()

    def note_step(self) -> None:
        """Notes that a step was completed."""
        self._blame.note_step()
        self._last_step_at = self._progress_at = time.monotonic()
        if not self._gaps:
            return
        record = self.records[-1] if self.records else None
        for request_id, (request, told) in tuple(self._gaps.items()):
            latest = request.metrics.last_token_time
            if latest is not None and latest > told and record is not None:
                record.longest_gap_s = max(record.longest_gap_s or 0.0, latest - told)
                del self._gaps[request_id]
            elif request.finished:
                del self._gaps[request_id]

    def health(self) -> EngineHealth:
        """The engine as it is now; may be asked from any thread."""
        now = time.monotonic()
        running = self.state is EngineState.RUNNING
        is_idle = running and not self._scheduler.has_unfinished_requests()
        last_step_at = self._last_step_at
        return EngineHealth(
            state=self.state,
            epoch=self._executor.epoch,
            num_recoveries=self.num_recoveries,
            last_step_age_s=None if last_step_at is None else now - last_step_at,
            stalled_s=0.0 if is_idle else now - self._progress_at,
            last_loss=self._loss,
        )

    def die(self, error: BaseException) -> None:
        """Notes that the engine cannot go on."""
        self.state = EngineState.DEAD
        self._failure = error

    def close(self) -> None:
        """Waits, a little, until nothing is being rebuilt; the executor was shut down before."""
        if self._rebuild is not None and not self._rebuild.wait(_CLOSE_S):
            logger.warning("a rebuild did not end within %.0f s of the shutdown", _CLOSE_S)

    def _convict(self, request: Request | None, loss: RankLoss) -> list[Request]:
        if request is None:
            return []
        reason = (
            f"request {request.request_id!r} was ended because it loses the engine's ranks: they "
            "were lost in steps that held it and others, and then twice while it ran alone; the "
            f"other requests go on. The last time: {loss.report()}"
        )
        logger.error("%s", reason)
        ended = self._scheduler.fail_request(request.request_id, reason)
        return [] if ended is None else [ended]

    def _attempt(self, loss: RankLoss, counts: bool = True) -> None:
        """Starts to make a new group, unless that was needed too often lately."""
        self._loss = loss
        now, limits = time.monotonic(), self._config.recovery
        if counts:
            self._counted.append(now)
        while self._counted and self._counted[0] < now - limits.window_s:
            self._counted.popleft()
        if len(self._counted) > limits.max_recoveries:
            self._give_up(
                f"its ranks were lost {counted(len(self._counted), 'time')} within "
                f"{limits.window_s:g} s, "
                f"and max_recoveries = {limits.max_recoveries}. The last time: {loss.report()}",
                GroupLostError(loss),
            )
        self._num_attempts += 1
        logger.error(
            "%s\n%s will wait for a new group of ranks (%d of %d recoveries within %g s)",
            loss.report(),
            counted(len(self._scheduler.unfinished_requests()), "request"),
            len(self._counted),
            limits.max_recoveries,
            limits.window_s,
        )
        self._rebuild = _Rebuild(self._executor)

    def _look_after_rebuild(self) -> None:
        assert self._rebuild is not None
        if not self._rebuild.wait(_WAIT_S):
            now = time.monotonic()
            if now - self._last_line_at > _PROGRESS_LINE_S:
                self._last_line_at = now
                logger.warning("still rebuilding the group, since %.1f s", now - self._lost_at)
            return
        rebuild, self._rebuild = self._rebuild, None
        try:
            ledgers = rebuild.result()
            blocks = make_block_manager(self._config.cache, *count_blocks(ledgers))
        except GroupLostError as error:
            self._attempt(error.loss)
            return
        except Exception as error:
            self._give_up(
                f"its ranks were lost and could not be replaced: {type(error).__name__}: {error}. "
                f"What was lost: {self._loss.report() if self._loss else ''}",
                error,
            )
        num_before = self._scheduler.block_manager.num_total_blocks
        self._scheduler.restart(blocks)
        self.ledgers = ledgers
        self.state = EngineState.RUNNING
        self._record(num_before, blocks.num_total_blocks)

    def _record(self, num_blocks_before: int, num_blocks: int) -> None:
        assert self._loss is not None
        self.num_recoveries += 1
        record = RecoveryRecord(
            epoch=self._executor.epoch,
            loss=self._loss,
            num_requests=len(self._scheduler.unfinished_requests()),
            num_attempts=self._num_attempts,
            ready_s=time.monotonic() - self._lost_at,
            phases_s=dict(self._executor.start_times_s),
            num_blocks=(num_blocks_before, num_blocks),
        )
        self.records.append(record)
        phases = ", ".join(f"{name} {spent:.2f}" for name, spent in record.phases_s.items())
        logger.warning(
            "the group is rebuilt: epoch %d after %.2f s%s and %s; KV cache of %d blocks, "
            "%d before; %s can go on",
            record.epoch,
            record.ready_s,
            f" ({phases})" if phases else "",
            counted(record.num_attempts, "attempt"),
            num_blocks,
            num_blocks_before,
            counted(record.num_requests, "request"),
        )

    def _give_up(self, reason: str, cause: Exception) -> NoReturn:
        """Ends the ranks, and all that waits for them.

        Raises:
            EngineDeadError: always.
        """
        error = EngineDeadError(f"the engine cannot go on: {reason}")
        error.__cause__ = cause
        self.die(error)
        try:
            self._executor.shutdown()
        except Exception:  # what brought the engine down is what its users are to see
            logger.exception("the ranks could not be ended in order")
        raise error
