"""Snapshots of an engine for those who need figures: plain data, safe to read from any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpengine.messages import MemoryLedger


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
        prefix_queries: prompt tokens of requests that started.
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
        refused: requests that were never taken, by why: invalid, duplicate, queue_full, draining.
        output_tokens_per_s: over the last seconds of work; 0 before the first step.
        step_seconds: by part of a step (schedule, execute, process, update, hand_over, and model,
            which is inside execute), in seconds since the start.
        devices: a line about the device of each rank, in rank order.
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
    output_tokens_per_s: float
    step_seconds: Mapping[str, float]
    devices: Sequence[str]
    ledgers: Sequence[MemoryLedger]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine lives, and whether it gets on.

    Attributes:
        state: running, recovering, draining or dead.
        alive: whether it can still serve; recovering and draining engines do.
        ready: whether new requests are welcome: it runs, and is idle or advancing.
        seconds_since_progress: since it was idle or finished a step.
        reason: why it is not ready, in words; empty when it is.
    """

    state: str
    alive: bool
    ready: bool
    seconds_since_progress: float
    reason: str = ""
