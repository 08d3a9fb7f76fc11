"""What an engine reports about itself: counters, its state, snapshots of both, and a log line.

Counters are written by the thread that steps and read by any thread. A reader may see a step of
which a part is counted, never a wrong value. Snapshots are plain data.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tpengine.config import EngineConfig
from tpengine.errors import RankLoss, counted
from tpengine.logger import init_logger
from tpengine.messages import MemoryLedger, StepOutput
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.drafter import DraftStats
from tpengine.scheduling.fairness import OwnerStats
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.sequence import Request
from tpengine.scheduling.step import SchedulerOutput, StepDecisions

logger = init_logger(__name__)

_LOG_INTERVAL_S = 5.0
_PREEMPTION_INTERVAL_S = 10.0
_RATE_WINDOW_S = 5
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(float(1 << power) for power in range(18))


@dataclass(slots=True)
class StepStats:
    """One step: what it computed and where its time went.

    Attributes:
        num_preempted: requests that gave their blocks up.
        num_output_tokens: without those of sequences that had ended.
        model_s: seconds inside the model, as the worker measured them, during execute, and while
            earlier steps were processed if it was in flight then.
        waited_s: see `StepOutput`.
        part_seconds: by part: schedule, execute, process, update, and model again.
    """

    num_prefill_tokens: int
    num_output_tokens: int
    num_rows: int
    num_preempted: int
    step_s: float
    model_s: float
    waited_s: float
    part_seconds: Mapping[str, float]

    @classmethod
    def of(
        cls,
        scheduled: SchedulerOutput,
        answer: StepOutput,
        decisions: StepDecisions,
        marks: tuple[float, ...],
    ) -> StepStats:
        """Returns the stats of a step that has ended.

        Args:
            marks: moments of `time.perf_counter`: the start, and the ends of schedule, execute,
                process, update and the report to users, which counts as a part of process.
        """
        start, sent, answered, processed, updated, end = marks
        return cls(
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_output_tokens=len(decisions.tokens),
            num_rows=len(scheduled.rows),
            num_preempted=len(scheduled.preempted),
            step_s=end - start,
            model_s=answer.model_s,
            waited_s=answer.waited_s,
            part_seconds={
                "schedule": sent - start,
                "execute": answered - sent,
                "model": answer.model_s,
                "process": processed - answered + end - updated,
                "update": updated - processed,
            },
        )


class Histogram:
    """Counts of values by upper bound, as Prometheus keeps them.

    It is our own because a value comes with every token: `observe` of prometheus_client takes a
    lock and walks the buckets, this one bisects.

    Args:
        bounds: ascending. Values above the last one have a count of their own.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RateMeter:
    """Events per second over the last five seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque(maxlen=2 * _RATE_WINDOW_S)
        self._first = 0

    def add(self, count: int) -> None:
        """Adds events of this moment."""
        now = int(time.monotonic())
        if not self._seconds:
            self._first = now
        elif self._seconds[-1][0] == now:
            count += self._seconds.pop()[1]
        self._seconds.append((now, count))

    def rate(self) -> float:
        """Returns the rate over whole seconds that have passed; 0 before the first has passed."""
        now = int(time.monotonic())
        begin = max(now - _RATE_WINDOW_S, self._first)
        seconds = tuple(self._seconds)
        return sum(c for s, c in seconds if begin <= s < now) / max(1, now - begin)


class EngineCounters:
    """What an engine has done since its start; times in seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.num_preemptions = 0
        self.prefix_hits = 0
        self.finished: Counter[str] = Counter()
        self.step_seconds: dict[str, float] = dict.fromkeys(
            ("schedule", "execute", "model", "process", "update", "hand_over"), 0.0
        )
        self.output_rate = RateMeter()
        self.step_s = Histogram(_SECONDS)
        self.step_tokens = Histogram(_TOKENS)
        self.queue_s = Histogram(_SECONDS)
        self.first_token_s = Histogram(_SECONDS)
        self.inter_token_s = Histogram(_SECONDS)
        self.whole_s = Histogram(_SECONDS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_output_tokens = Histogram(_TOKENS)

    def record_step(self, stats: StepStats) -> None:
        """Counts a step."""
        self.num_steps += 1
        self.output_tokens += stats.num_output_tokens
        self.num_preemptions += stats.num_preempted
        self.output_rate.add(stats.num_output_tokens)
        self.step_s.observe(stats.step_s)
        self.step_tokens.observe(stats.num_prefill_tokens + stats.num_output_tokens)
        for part, spent_s in stats.part_seconds.items():
            self.step_seconds[part] += spent_s

    def record_token(self, request: Request, now: float, decisions: StepDecisions) -> None:
        """Counts a request's newest token; tokens that its sequences got in one step have one time.

        Args:
            now: seconds of `time.time`.
            decisions: of the step; they get the token's time.
        """
        metrics = request.metrics
        metrics.num_sampled_tokens += 1
        before, metrics.last_token_time = metrics.last_token_time, now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            self.record_prompt(request)
            self.first_token_s.observe(now - metrics.arrival_time)
            decisions.first_token_s.append(now - metrics.arrival_time)
        elif now > before:
            self.inter_token_s.observe(now - before)
            decisions.inter_token_s.append(now - before)

    def record_prompt(self, request: Request) -> None:
        """Counts a request whose prompt is computed, also of a model that makes no tokens."""
        self.prompt_tokens += request.num_prompt_tokens
        self.prefix_hits += request.metrics.num_cached_tokens
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        if request.metrics.time_in_queue is not None:
            self.queue_s.observe(request.metrics.time_in_queue)

    def record_finish(self, request: Request, now: float) -> None:
        """Counts the end of a request, for any reason."""
        request.metrics.finished_time = now
        reason = request.finish_reason or request.sequences[0].status.finish_reason
        self.finished[str(reason)] += 1
        self.whole_s.observe(now - request.metrics.arrival_time)
        self.request_output_tokens.observe(sum(s.num_output_tokens for s in request.sequences))


class StatLogger:
    """Adds up steps, and logs a line after every five seconds of work. Rates are over the time
    spent in steps: a pause between steps does not lower them."""

    def __init__(self) -> None:
        self._steps: list[StepStats] = []
        self._step_s = 0.0

    def record(self, stats: StepStats, scheduler: Scheduler) -> None:
        """Adds a step. What the line says of queues and cache is of the moment."""
        self._steps.append(stats)
        self._step_s += stats.step_s
        if self._step_s >= _LOG_INTERVAL_S:
            self.log(scheduler)

    def log(self, scheduler: Scheduler) -> None:
        """Logs the line about the steps since the last one."""
        blocks, step_s = scheduler.block_manager, self._step_s or 1.0
        num_held = blocks.num_total_blocks - blocks.num_free_blocks
        num_unused = blocks.num_unused_places(scheduler.running_sequences())
        num_swapped_out = blocks.host.num_blocks - blocks.host.num_free
        logger.info(
            "prefill %.1f tokens/s, output %.1f tokens/s; %d running, %d waiting, %d swapped; KV "
            "cache %.1f %% used, %.1f %% of that without a token; swap space %.1f %% used; %d "
            "cached blocks reused, %d evicted; %.1f %% of step time outside the model",
            sum(step.num_prefill_tokens for step in self._steps) / step_s,
            sum(step.num_output_tokens for step in self._steps) / step_s,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_swapped,
            100 * num_held / blocks.num_total_blocks,
            100 * num_unused / max(1, num_held * blocks.block_size),
            100 * num_swapped_out / max(1, blocks.host.num_blocks),
            blocks.device.num_hits,
            blocks.device.num_evictions,
            100 * max(0.0, self._step_s - sum(step.model_s for step in self._steps)) / step_s,
        )
        self._steps.clear()
        self._step_s = 0.0


class PreemptionLog:
    """Warns of preemptions: of the first one, and then at most every ten seconds."""

    def __init__(self, config: EngineConfig) -> None:
        cache, scheduler = config.cache, config.scheduler
        if cache.num_device_blocks_override is not None:
            knob = f"num_device_blocks_override (now {cache.num_device_blocks_override})"
        elif config.device != "cpu":
            knob = f"gpu_memory_utilization (now {cache.gpu_memory_utilization:g})"
        elif cache.cpu_kv_cache_bytes is None:
            knob = "cpu_kv_cache_space (now not set)"
        else:
            knob = f"cpu_kv_cache_space (now {cache.cpu_kv_cache_bytes / (1 << 30):g} GiB)"
        self._reason = (
            "the KV cache has too few blocks for what runs at once, and requests give theirs up "
            f"(preemption_mode is {scheduler.preemption_mode}); raise {knob}, or lower "
            f"max_num_seqs (now {scheduler.max_num_seqs})"
        )
        self._next_at = 0.0

    def record(self, num_preemptions: int) -> None:
        """Logs the number of preemptions since the start, which has grown."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + _PREEMPTION_INTERVAL_S
            total = counted(num_preemptions, "preemption")
            logger.warning("%s since the start: %s", total, self._reason)


class EngineState(enum.Enum):
    """What an engine does with the requests that it has."""

    RUNNING = "running"
    RECOVERING = "recovering"
    """Ranks were lost and are being replaced; requests wait."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class RecoveryProgress:
    """A recovery that goes on; times in seconds.

    Attributes:
        loss: what it recovers from; None: the group was ended to get all ranks again.
        elapsed_s: since the loss's detection.
        num_attempts: at a new group, with the present one.
        phases_s: those phases of the latest attempt that have ended.
        phase: what the present attempt does; None: it begins, or has failed, or the executor does
            not measure it.
    """

    loss: RankLoss | None
    elapsed_s: float
    num_attempts: int
    phases_s: Mapping[str, float]
    phase: str | None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of an `LLMEngine` at a moment.

    Attributes:
        epoch: number of the group of ranks, from 1.
        num_recoveries: from losses.
        stalled_s: seconds for which there was work, or no group, and no step was completed.
        failure: the error that ended the engine; None: no error did.
        recovery: the one that goes on; None: none does.
        num_ranks: of the group, or of the one that is being started.
        num_ranks_wanted: as the user has asked for; fewer run while there is no room (`min_ranks`).
    """

    state: EngineState
    epoch: int
    num_recoveries: int
    stalled_s: float
    num_ranks: int
    num_ranks_wanted: int
    failure: BaseException | None = None
    recovery: RecoveryProgress | None = None


@dataclass(slots=True)
class RecoveryRecord:
    """One recovery, for the log and for benchmarks; times in seconds.

    Attributes:
        epoch: of the new group.
        loss: what it recovered from; of a group that grows again, what has made it smaller.
        num_requests: unfinished requests, which the new group continues.
        num_attempts: at a new group; the last one succeeded.
        ready_s: from the loss's detection until a step could be scheduled.
        phases_s: what the last attempt spent that time on, where the executor measures it.
        num_blocks: of the KV cache, before and after.
        longest_gap_s: longest time between a request's last token before the loss and its next one,
            of those that have got it by now; None: no request has.
        is_resumed: whether only the lost rank was replaced, and nothing computed again but the
            unanswered steps.
    """

    epoch: int
    loss: RankLoss
    num_requests: int
    num_attempts: int
    ready_s: float
    phases_s: dict[str, float]
    num_blocks: tuple[int, int]
    longest_gap_s: float | None = None
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Lengths of the queues, in requests unless said otherwise.

    Attributes:
        num_waiting: requests without blocks: new ones, and those preempted by recompute.
        num_queued: requests without a first step; `QueueLimits` bounds them.
        num_queued_tokens: prompt tokens of those.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_queued: int
    num_queued_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The KV cache, in blocks of `block_size` tokens, and prefix hits, in prompt tokens.

    Attributes:
        usage: share of the device blocks that is held, in [0, 1].
        host_usage: the same of the blocks for swapping; 0 if there are none.
        prefix_hits: those of `EngineStats.prompt_tokens` whose K and V were in the cache.
    """

    block_size: int
    num_total_blocks: int
    num_free_blocks: int
    usage: float
    host_usage: float
    prefix_hits: int

    @classmethod
    def of(cls, blocks: BlockManager, prefix_hits: int) -> CacheStats:
        """Of the cache at this moment."""
        total, free, on_host = blocks.num_total_blocks, blocks.num_free_blocks, blocks.host
        host_usage = 1 - on_host.num_free / on_host.num_blocks if on_host.num_blocks else 0.0
        return cls(blocks.block_size, total, free, 1 - free / total, host_usage, prefix_hits)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at a moment, for reports and metrics.

    Attributes:
        state: running, recovering, draining or dead.
        epoch: number of the group of ranks, from 1.
        num_ranks, num_ranks_wanted: see `EngineHealth`.
        prompt_tokens: of the requests that have started.
        output_tokens, num_preemptions, num_steps: since the start.
        finished: requests by how they ended: stop, length, abort, error; since the start.
        refused: requests that were not taken, by the class of the error.
        output_tokens_per_s: over the last five seconds.
        step_seconds: by part of a step (schedule, execute, process, update, hand_over, and model,
            which runs during the others), in seconds since the start.
        devices: a line about the device of each rank, in rank order.
        nodes: the machine of each rank, by address or name.
        ledgers: each rank's memory, in rank order.
        owners: with `fairness="owner"`, by label; the 64 that came first, and others together.
        drafts: with lookahead, by source and place among a sequence's drafts, from 0: how many were
            computed, and how many of them came true.
    """

    state: str
    epoch: int
    num_ranks: int
    num_ranks_wanted: int
    recoveries: int
    queues: QueueStats
    cache: CacheStats
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    finished: Mapping[str, int]
    refused: Mapping[str, int]
    output_tokens_per_s: float
    step_seconds: Mapping[str, float]
    devices: Sequence[str]
    nodes: Sequence[str]
    ledgers: Sequence[MemoryLedger]
    owners: Mapping[str, OwnerStats]
    drafts: Mapping[tuple[str, int], DraftStats]

    @classmethod
    def of(
        cls,
        health: EngineHealth,
        scheduler: Scheduler,
        counters: EngineCounters,
        devices: Sequence[str],
        nodes: Sequence[str],
        ledgers: Sequence[MemoryLedger],
    ) -> EngineStats:
        """Of an engine at this moment, without a queue of its own before the scheduler."""
        return cls(
            state=health.state.value,
            epoch=health.epoch,
            num_ranks=health.num_ranks,
            num_ranks_wanted=health.num_ranks_wanted,
            recoveries=health.num_recoveries,
            queues=QueueStats(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_swapped=scheduler.num_swapped,
                num_queued=scheduler.num_waiting,
                num_queued_tokens=0,
            ),
            cache=CacheStats.of(scheduler.block_manager, counters.prefix_hits),
            num_steps=counters.num_steps,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            num_preemptions=counters.num_preemptions,
            finished=dict(counters.finished),
            refused={},
            output_tokens_per_s=counters.output_rate.rate(),
            step_seconds=dict(counters.step_seconds),
            devices=tuple(devices),
            nodes=tuple(nodes),
            ledgers=tuple(ledgers),
            owners=scheduler.owner_stats(),
            drafts={} if scheduler.drafter is None else scheduler.drafter.stats(),
        )


class Stats:
    """What a logger of `LLMEngine.add_logger` gets, with the names of vLLM 0.5.4: the state after a
    step, what the step did, and the requests that it finished. Usages are in [0, 1], times in
    seconds.

    Args:
        step: None: of this moment, without a step.
        decisions: of the step.
    """

    spec_decode_metrics = None

    def __init__(
        self, engine: EngineStats, step: StepStats | None, decisions: StepDecisions
    ) -> None:
        requests = [request for request in decisions.to_report.values() if request.finished]
        sequences = [sequence for request in requests for sequence in request.sequences]
        self.now = time.time()
        self.num_running_sys = engine.queues.num_running
        self.num_waiting_sys = engine.queues.num_waiting
        self.num_swapped_sys = engine.queues.num_swapped
        self.gpu_cache_usage_sys = engine.cache.usage
        self.cpu_cache_usage_sys = engine.cache.host_usage
        self.num_prompt_tokens_iter = step.num_prefill_tokens if step else 0
        self.num_generation_tokens_iter = step.num_output_tokens if step else 0
        self.num_preemption_iter = step.num_preempted if step else 0
        self.time_to_first_tokens_iter = decisions.first_token_s
        self.time_per_output_tokens_iter = decisions.inter_token_s
        self.time_e2e_requests = [self.now - r.metrics.arrival_time for r in requests]
        self.num_prompt_tokens_requests = [r.num_prompt_tokens for r in requests]
        self.num_generation_tokens_requests = [s.num_output_tokens for s in sequences]
        self.best_of_requests = [r.sampling_params.num_sequences for r in requests]
        self.n_requests = [r.sampling_params.n for r in requests]
        self.finished_reason_requests = [s.status.finish_reason for s in sequences]


class StatLoggerBase(ABC):
    """Base of a user's logger for `LLMEngine.add_logger`."""

    def __init__(self, local_interval: float) -> None:
        self.local_interval = local_interval
        self.last_local_log = time.time()

    @abstractmethod
    def log(self, stats: Stats) -> None:
        """Takes the stats of a step."""


class StepLoggers:
    """What tells of each step: the log, and loggers of users.

    Attributes:
        of_users: by name.
        failed: names of those that raised an error. It is logged, once: the user's code must not
            end the engine, nor fill its log.
    """

    def __init__(self, config: EngineConfig, log_stats: bool) -> None:
        self.of_users: dict[str, StatLoggerBase] = {}
        self.failed: set[str] = set()
        self._line = StatLogger() if log_stats else None
        self._preemptions = PreemptionLog(config)

    def record(
        self,
        step: StepStats,
        decisions: StepDecisions,
        scheduler: Scheduler,
        counters: EngineCounters,
        stats: Callable[[], EngineStats],
    ) -> None:
        """Tells of a step that is counted.

        Args:
            stats: returns those of this moment. It is not kept: with its own method in it an engine
                would be freed only by a collection of cycles, and its ranks with it.
        """
        if step.num_preempted:
            self._preemptions.record(counters.num_preemptions)
        if self._line is not None:
            self._line.record(step, scheduler)
        self._call(step, decisions, stats)

    def log_now(self, scheduler: Scheduler, stats: Callable[[], EngineStats]) -> None:
        """Logs the line of statistics, and calls the loggers of users, without a step."""
        if self._line is not None:
            self._line.log(scheduler)
        self._call(None, StepDecisions(), stats)

    def _call(
        self, step: StepStats | None, decisions: StepDecisions, stats: Callable[[], EngineStats]
    ) -> None:
        if not self.of_users:
            return
        present = Stats(stats(), step, decisions)
        for name, stat_logger in tuple(self.of_users.items()):
            try:
                stat_logger.log(present)
            except Exception:
                if name not in self.failed:
                    self.failed.add(name)
                    logger.exception("the logger %r failed; this is logged once", name)


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """Whether an `AsyncLLMEngine` lives, and whether it makes progress.

    Attributes:
        state: running, recovering, draining or dead.
        alive: whether it can still serve; recovering and draining engines do.
        ready: whether it should get new requests: it is idle or advances, and a recovery, if there
            is one, has not lasted too long.
        seconds_since_progress: since it was idle or finished a step.
        reason: why it is not ready, in words; empty when it is.
    """

    state: str
    alive: bool
    ready: bool
    seconds_since_progress: float
    reason: str = ""
