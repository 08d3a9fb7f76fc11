"""Snapshots of an engine for those who need figures: plain data, safe to read from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpengine.engine.figures import EngineFigures
from tpengine.engine.health import EngineHealth
from tpengine.executor.executor import Executor
from tpengine.messages import MemoryLedger
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Who waits and who runs, in requests unless said otherwise.

    Attributes:
        num_waiting: those that hold no blocks: new ones, and those preempted by recompute.
        num_queued: those that have not started; what `QueueLimits` bounds.
        num_queued_tokens: prompt tokens of those.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_queued: int
    num_queued_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The KV cache, in blocks of `block_size` tokens, and what prefixes brought, in prompt tokens.

    Attributes:
        usage: share of the device blocks that is held, in [0, 1].
        host_usage: the same of the blocks for swapping; 0 where there are none.
        prefix_queries: prompt tokens of requests that started, whether or not prefixes are kept.
        prefix_hits: those of them whose K and V were in the cache.
    """

    block_size: int
    num_total_blocks: int
    num_free_blocks: int
    usage: float
    host_usage: float
    prefix_queries: int
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of an engine.

    Attributes:
        state: running, recovering, draining or dead.
        epoch: number of the group of ranks, from 1.
        prompt_tokens, output_tokens, num_preemptions, num_steps: since the start.
        finished: requests by how they ended: stop, length, abort, ignored, error; since the start.
        refused: requests that were never taken, by the class of the error.
        prompt_tokens_per_s, output_tokens_per_s: over the last five seconds.
        step_seconds: by part of a step (schedule, execute, process, update, hand_over, and model,
            which is inside execute), in seconds since the start.
        devices: a line about the device of each rank, in rank order.
        nodes: the machine of each rank, by address or name.
        ledgers: each rank's memory, in rank order.
    """

    state: str
    epoch: int
    recoveries: int
    queues: QueueStats
    cache: CacheStats
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    num_preemptions: int
    finished: Mapping[str, int]
    refused: Mapping[str, int]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    step_seconds: Mapping[str, float]
    devices: Sequence[str]
    nodes: Sequence[str]
    ledgers: Sequence[MemoryLedger]


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """Whether an engine lives, and whether it gets on.

    Attributes:
        state: running, recovering, draining or dead.
        alive: whether it can still serve; recovering and draining engines do.
        ready: whether new requests are welcome: it is idle or advancing, and ranks that it lost, if
            any, have not been away for too long.
        seconds_since_progress: since it was idle or finished a step.
        reason: why it is not ready, in words; empty when it is.
    """

    state: str
    alive: bool
    ready: bool
    seconds_since_progress: float
    reason: str = ""


def judge_health(
    state: str, silent_s: float, max_step_s: float, failure: BaseException | None
) -> ServiceHealth:
    """Whether an engine that has shown no progress for `silent_s` seconds is well.

    Args:
        max_step_s: from then on it is not ready.
        failure: what ended it, if anything did.
    """
    if state == "dead":
        cause = "it was shut down" if failure is None else f"{type(failure).__name__}: {failure}"
        return ServiceHealth(state, False, False, silent_s, f"the engine is dead: {cause}")
    if state == "draining":
        return ServiceHealth(state, True, False, silent_s, "the engine is draining")
    if silent_s > max_step_s:
        reason = f"no step was finished for {silent_s:.1f} s, and requests wait for one"
        return ServiceHealth(state, True, False, silent_s, reason)
    return ServiceHealth(state, True, True, silent_s)


def take_stats(
    health: EngineHealth,
    scheduler: Scheduler,
    figures: EngineFigures,
    executor: Executor,
    ledgers: Sequence[MemoryLedger],
) -> EngineStats:
    """The figures of this moment; reads only, and counts nothing."""
    num_waiting = scheduler.num_waiting
    return EngineStats(
        state=health.state.value,
        epoch=health.epoch,
        recoveries=health.num_recoveries,
        queues=QueueStats(
            num_running=scheduler.num_running,
            num_waiting=num_waiting,
            num_swapped=scheduler.num_swapped,
            num_queued=num_waiting,
            num_queued_tokens=0,
        ),
        cache=_cache_stats(scheduler.block_manager, figures),
        num_steps=figures.num_steps,
        prompt_tokens=figures.prompt_tokens,
        output_tokens=figures.output_tokens,
        num_preemptions=figures.num_preemptions,
        finished=dict(figures.finished),
        refused={},
        prompt_tokens_per_s=figures.prompt_rate.rate(),
        output_tokens_per_s=figures.output_rate.rate(),
        step_seconds=dict(figures.step_seconds),
        devices=tuple(executor.devices),
        nodes=tuple(executor.nodes),
        ledgers=tuple(ledgers),
    )


def _cache_stats(blocks: BlockManager, figures: EngineFigures) -> CacheStats:
    num_free, num_total = blocks.num_free_blocks, blocks.num_total_blocks
    num_host = blocks.host.num_blocks
    return CacheStats(
        block_size=blocks.block_size,
        num_total_blocks=num_total,
        num_free_blocks=num_free,
        usage=1 - num_free / num_total,
        host_usage=1 - blocks.host.num_free / num_host if num_host else 0.0,
        prefix_queries=figures.prompt_tokens,
        prefix_hits=figures.prefix_hits,
    )
