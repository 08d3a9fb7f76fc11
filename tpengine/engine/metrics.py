"""What the engine did lately, as one line in the log while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.logger import init_logger
from tpengine.scheduling.scheduler import Scheduler
from tpengine.scheduling.step import SchedulerOutput

logger = init_logger(__name__)

_INTERVAL_S = 5.0


@dataclass(slots=True)
class StepStats:
    """One step: what it computed and where its time went, in seconds.

    Attributes:
        model_s: inside the model, as the worker measured it; a part of `execute_s`, and of the time
            since the last step where a GPU has begun this one in between.
        num_preempted: requests that gave their blocks up.
        schedule_s, execute_s, process_s, update_s: the four parts of a step, in their order.
    """

    num_prefill_tokens: int
    num_output_tokens: int
    num_rows: int
    step_s: float
    model_s: float
    num_preempted: int
    schedule_s: float
    execute_s: float
    process_s: float
    update_s: float

    @classmethod
    def of(cls, scheduled: SchedulerOutput, model_s: float, marks: tuple[float, ...]) -> StepStats:
        """Of a step that is over.

        Args:
            marks: moments of `time.perf_counter`: the start, and the ends of schedule, execute,
                process, update, and of the report to users, which counts as a part of process.
        """
        start, sent, answered, processed, updated, end = marks
        return cls(
            num_prefill_tokens=scheduled.num_prefill_tokens,
            num_output_tokens=len(scheduled.sampled),
            num_rows=len(scheduled.rows),
            step_s=end - start,
            model_s=model_s,
            num_preempted=len(scheduled.preempted),
            schedule_s=sent - start,
            execute_s=answered - sent,
            process_s=processed - answered + end - updated,
            update_s=updated - processed,
        )


class StatLogger:
    """Adds up steps and writes a line after every few seconds of work.

    Rates are over the time spent in steps, so that a pause is nobody's slowness.

    Args:
        interval_s: seconds of work between lines.
    """

    def __init__(self, interval_s: float = _INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._steps: list[StepStats] = []
        self._step_s = 0.0

    def record(self, stats: StepStats, scheduler: Scheduler) -> None:
        """Notes a step; the other figures are of the moment."""
        self._steps.append(stats)
        self._step_s += stats.step_s
        if self._step_s < self._interval_s:
            return
        blocks = scheduler.block_manager
        num_held = blocks.num_total_blocks - blocks.num_free_blocks
        num_unused = blocks.num_unused_places(scheduler.running_sequences())
        logger.info(
            "prefill %.1f tokens/s, output %.1f tokens/s; %d running, %d waiting, %d swapped; KV "
            "cache %.1f %% used, %.1f %% of that without a token; %d cached blocks reused, %d "
            "evicted; %.1f %% of step time outside the model",
            sum(step.num_prefill_tokens for step in self._steps) / self._step_s,
            sum(step.num_output_tokens for step in self._steps) / self._step_s,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_swapped,
            100 * num_held / blocks.num_total_blocks,
            100 * num_unused / max(1, num_held * blocks.block_size),
            blocks.device.num_hits,
            blocks.device.num_evictions,
            100 * max(0.0, 1 - sum(step.model_s for step in self._steps) / self._step_s),
        )
        self._steps.clear()
        self._step_s = 0.0
