"""An engine's figures for Prometheus, under the names that dashboards of vLLM know (`tpengine:`
in place of `vllm:`).

Nothing is counted here: a scrape reads what the engine has, so that steps never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tpengine.engine.engine_stats import EngineStats
from tpengine.engine.figures import EngineFigures, Histogram

STATES = ("running", "recovering", "draining", "dead")


class EngineCollector:
    """Makes the metrics of one engine when they are asked for.

    Args:
        model_name: the label `model_name` of every metric.
        stats: the engine's snapshot of the moment.
        figures: where its histograms are.
    """

    def __init__(
        self, model_name: str, stats: Callable[[], EngineStats], figures: EngineFigures
    ) -> None:
        self._model_name = model_name
        self._stats = stats
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """All metrics, as prometheus_client wants them."""
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        for name, (text, histogram) in self._histograms().items():
            yield self._histogram(name, text, histogram)

    def _gauges(self, stats: EngineStats) -> Iterable[Metric]:
        queues, cache = stats.queues, stats.cache
        values = {
            "num_requests_running": (
                "Requests that hold blocks on the device.",
                queues.num_running,
            ),
            "num_requests_waiting": (
                "Requests that wait: not started, or to be computed again.",
                # Some of those that have not started may not have reached the scheduler yet.
                max(queues.num_waiting, queues.num_queued),
            ),
            "num_requests_swapped": ("Requests whose blocks are on the host.", queues.num_swapped),
            "num_queued_tokens": (
                "Prompt tokens of requests that have not started.",
                queues.num_queued_tokens,
            ),
            "kv_cache_usage_perc": ("Share of the KV cache that is held; 1 is all.", cache.usage),
            "cpu_cache_usage_perc": (
                "Share of the host blocks for swapping that is held; 1 is all.",
                cache.host_usage,
            ),
            "engine_epoch": ("Number of the group of ranks, from 1.", stats.epoch),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"tpengine:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        state = GaugeMetricFamily(
            "tpengine:engine_state", "1 for the state it is in.", labels=["model_name", "state"]
        )
        for one in STATES:
            state.add_metric([self._model_name, one], float(stats.state == one))
        yield state

    def _counters(self, stats: EngineStats) -> Iterable[Metric]:
        values = {
            "num_preemptions": ("Times that a request gave its blocks up.", stats.num_preemptions),
            "recoveries": ("Times that the group of ranks was rebuilt.", stats.recoveries),
            "prompt_tokens": ("Prompt tokens of requests that have started.", stats.prompt_tokens),
            "generation_tokens": ("Tokens that were generated.", stats.output_tokens),
            "prefix_cache_queries": (
                "Prompt tokens that were looked up in the cache.",
                stats.cache.prefix_queries,
            ),
            "prefix_cache_hits": (
                "Prompt tokens that were found in the cache.",
                stats.cache.prefix_hits,
            ),
            "engine_steps": ("Steps that were computed.", stats.num_steps),
        }
        for name, (text, value) in values.items():
            counter = CounterMetricFamily(f"tpengine:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        families: dict[str, tuple[str, str, Mapping[str, float]]] = {
            "request_success": (
                "Requests that ended in the engine, by how.",
                "finished_reason",
                stats.finished,
            ),
            "requests_refused": ("Requests that were not taken, by why.", "reason", stats.refused),
            "step_seconds": (
                "Time in steps by part; model is a part of execute.",
                "part",
                stats.step_seconds,
            ),
        }
        for name, (text, label, by_label) in families.items():
            counter = CounterMetricFamily(f"tpengine:{name}", text, labels=["model_name", label])
            for key, amount in by_label.items():
                counter.add_metric([self._model_name, key], amount)
            yield counter

    def _histograms(self) -> dict[str, tuple[str, Histogram]]:
        figures = self._figures
        return {
            "time_to_first_token_seconds": (
                "From arrival to the first token.",
                figures.first_token_s,
            ),
            "inter_token_latency_seconds": (
                "Between tokens of a request.",
                figures.inter_token_s,
            ),
            "e2e_request_latency_seconds": ("From arrival to the end.", figures.whole_s),
            "request_queue_time_seconds": ("From arrival to the first step.", figures.queue_s),
            "request_prompt_tokens": (
                "Prompt tokens of requests that have started.",
                figures.request_prompt_tokens,
            ),
            "request_generation_tokens": (
                "Tokens that requests had at their end.",
                figures.request_output_tokens,
            ),
            "iteration_tokens_total": ("Tokens of a step.", figures.step_tokens),
            "engine_step_duration_seconds": ("Time of a step.", figures.step_s),
        }

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"tpengine:{name}", text, labels=["model_name"])
        buckets, num_values = [], 0
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        for bound, count in zip(bounds, tuple(histogram.counts), strict=True):
            num_values += count
            buckets.append((bound, num_values))
        family.add_metric([self._model_name], buckets, histogram.total)
        return family


def make_registry(collector: EngineCollector) -> CollectorRegistry:
    """A registry of this engine's own: a process may hold several engines."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
