"""What an engine did since its start: counters and histograms.

Written by the thread that steps, read by any: a reader may see a step half-counted, never a wrong
value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from tpengine.engine.metrics import StepStats
from tpengine.sequence import Request

_RATE_WINDOW_S = 5
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(float(1 << power) for power in range(18))


class Histogram:
    """Counts of values by upper bound, as Prometheus keeps them.

    Own, since a value comes with every token: an `observe` of prometheus_client takes a lock and
    walks the buckets, this is a bisection.

    Args:
        bounds: ascending; values above the last are counted beside them.
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
    """Things per second over the last five."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque(maxlen=2 * _RATE_WINDOW_S)
        self._first = 0

    def add(self, count: int) -> None:
        """Notes that so many came now."""
        now = int(time.monotonic())
        if not self._seconds:
            self._first = now
        elif self._seconds[-1][0] == now:
            count += self._seconds.pop()[1]
        self._seconds.append((now, count))

    def rate(self) -> float:
        """Per second, over whole seconds that have passed; 0 before the first has."""
        now = int(time.monotonic())
        begin = max(now - _RATE_WINDOW_S, self._first)
        seconds = tuple(self._seconds)
        return sum(c for s, c in seconds if begin <= s < now) / max(1, now - begin)


class EngineFigures:
    """All of them; times in seconds."""

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
        self.prompt_rate = RateMeter()
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
        self.prompt_rate.add(stats.num_prefill_tokens)
        self.output_rate.add(stats.num_output_tokens)
        self.step_s.observe(stats.step_s)
        self.step_tokens.observe(stats.num_prefill_tokens + stats.num_output_tokens)
        seconds = self.step_seconds
        seconds["schedule"] += stats.schedule_s
        seconds["execute"] += stats.execute_s
        seconds["model"] += stats.model_s
        seconds["process"] += stats.process_s
        seconds["update"] += stats.update_s

    def record_token(self, request: Request, now: float) -> None:
        """Notes the moment of a request's newest token, in seconds of `time.time`; several
        sequences of a request count once."""
        metrics = request.metrics
        metrics.num_sampled_tokens += 1
        before, metrics.last_token_time = metrics.last_token_time, now
        if before is None:
            metrics.first_token_time = now
            num_prompt_tokens = len(request.prompt_token_ids)
            self.prompt_tokens += num_prompt_tokens
            self.prefix_hits += metrics.num_cached_tokens
            self.request_prompt_tokens.observe(num_prompt_tokens)
            self.first_token_s.observe(now - metrics.arrival_time)
            if metrics.time_in_queue is not None:
                self.queue_s.observe(metrics.time_in_queue)
        elif now > before:
            self.inter_token_s.observe(now - before)

    def record_end(self, request: Request, now: float) -> None:
        """Notes the end of a request, however it came."""
        request.metrics.finished_time = now
        reason = request.finish_reason or request.sequences[0].status.finish_reason
        self.finished[str(reason)] += 1
        self.whole_s.observe(now - request.metrics.arrival_time)
        self.request_output_tokens.observe(sum(s.num_output_tokens for s in request.sequences))
