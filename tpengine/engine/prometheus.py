"""An engine's counters for Prometheus, under the names that dashboards of vLLM use, with
`tpengine:` in place of `vllm:`.

Nothing is counted here: a scrape reads what the engine has, so that steps never wait for it. The
metrics are not registered, because a process may hold more than one engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tpengine.engine.stats import EngineCounters, EngineStats, Histogram

_STATES = ("running", "recovering", "draining", "dead")
# Name of the metric, attribute of EngineStats, help text.
_GAUGES = (
    ("num_requests_running", "queues.num_running", "Requests that hold blocks on the device."),
    ("num_requests_swapped", "queues.num_swapped", "Requests whose blocks are on the host."),
    ("num_queued_tokens", "queues.num_queued_tokens", "Prompt tokens of requests not started."),
    ("kv_cache_usage_perc", "cache.usage", "Share of the KV cache that is held; 1 is all."),
    ("cpu_cache_usage_perc", "cache.host_usage", "Share of the swap space that is held; 1 is all."),
    ("engine_epoch", "epoch", "Number of the group of ranks, from 1."),
    ("num_ranks", "num_ranks", "Ranks of the present group, or of the next one."),
    ("num_ranks_wanted", "num_ranks_wanted", "Ranks that were asked for."),
)
_COUNTERS = (
    ("num_preemptions", "num_preemptions", "Times that a request gave its blocks up."),
    ("recoveries", "recoveries", "Times that the group of ranks was rebuilt."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have started."),
    ("generation_tokens", "output_tokens", "Tokens that were generated."),
    ("prefix_cache_queries", "prompt_tokens", "Prompt tokens looked up in the cache."),
    ("prefix_cache_hits", "cache.prefix_hits", "Prompt tokens found in the cache."),
    ("engine_steps", "num_steps", "Steps that were computed."),
)
# With the label's name before the help text: the attribute is a number by label.
_LABELLED_COUNTERS = (
    ("request_success", "finished", "finished_reason", "Requests that ended in the engine."),
    ("requests_refused", "refused", "reason", "Requests that were not taken."),
    ("step_seconds", "step_seconds", "part", "Time in steps; model, of rank 0, overlaps others."),
)
# With an attribute of OwnerStats; their label is `owner`.
_OF_OWNERS = (
    (GaugeMetricFamily, "owner_requests_waiting", "num_waiting", "Requests that wait, by owner."),
    (GaugeMetricFamily, "owner_requests_running", "num_running", "Requests begun, by owner."),
    (CounterMetricFamily, "owner_tokens", "num_tokens", "Tokens computed or given, by owner."),
)
# In the order of `DraftStats`.
_OF_DRAFTS = (
    ("spec_decode_num_draft_tokens", "Tokens that were guessed and computed."),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that came true."),
)
# With an attribute of EngineCounters.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "first_token_s", "From arrival to the first token."),
    (
        "inter_token_latency_seconds",
        "inter_token_s",
        "Between tokens of a request that come in different steps; accepted drafts come together.",
    ),
    ("e2e_request_latency_seconds", "whole_s", "From arrival to the end."),
    ("request_queue_time_seconds", "queue_s", "From arrival to the first step."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of started requests."),
    ("request_generation_tokens", "request_output_tokens", "Tokens of requests at their end."),
    ("iteration_tokens_total", "step_tokens", "Tokens of a step."),
    ("engine_step_duration_seconds", "step_s", "Time of a step."),
)


class EngineMetrics(Collector):
    """The metrics of one engine at a moment.

    Args:
        model_name: the label `model_name` of every metric.
        counters: hold the histograms.
    """

    def __init__(self, model_name: str, stats: EngineStats, counters: EngineCounters) -> None:
        self._model_name = model_name
        self._stats = stats
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        """Yields all metrics, as prometheus_client asks for them."""
        stats = self._stats
        for name, attribute, text in _GAUGES:
            yield self._add(GaugeMetricFamily, name, text, {(): attrgetter(attribute)(stats)})
        # A request that has not started may not have reached the scheduler's queue yet.
        num_waiting = max(stats.queues.num_waiting, stats.queues.num_queued)
        text = "Requests that wait: not started, or to be computed again."
        yield self._add(GaugeMetricFamily, "num_requests_waiting", text, {(): num_waiting})
        states = {(state,): float(stats.state == state) for state in _STATES}
        text = "1 for the state that the engine is in."
        yield self._add(GaugeMetricFamily, "engine_state", text, states, "state")
        for name, attribute, text in _COUNTERS:
            yield self._add(CounterMetricFamily, name, text, {(): attrgetter(attribute)(stats)})
        for name, attribute, label, text in _LABELLED_COUNTERS:
            counts = {(key,): count for key, count in getattr(stats, attribute).items()}
            yield self._add(CounterMetricFamily, name, text, counts, label)
        for kind, name, attribute, text in _OF_OWNERS if stats.owners else ():
            values = {(key,): getattr(owner, attribute) for key, owner in stats.owners.items()}
            yield self._add(kind, name, text, values, "owner")
        for place, (name, text) in enumerate(_OF_DRAFTS):
            drafts = stats.drafts.items()
            by_place = {(source, str(at)): counts[place] for (source, at), counts in drafts}
            yield self._add(CounterMetricFamily, name, text, by_place, "source", "position")
        text = "Memory of a rank by use; others: of processes that share its device."
        memory = {
            (str(ledger.rank), use): num_bytes
            for ledger in stats.ledgers
            for use, num_bytes in ledger.uses(stats.cache.num_total_blocks).items()
        }
        yield self._add(GaugeMetricFamily, "rank_memory_bytes", text, memory, "rank", "use")
        for name, attribute, text in _HISTOGRAMS:
            yield self._histogram(name, text, getattr(self._counters, attribute))

    def _add(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[Any, float],
        *labels: str,
    ) -> Metric:
        """Returns a metric with its values by the values of the labels."""
        family = kind(f"tpengine:{name}", text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"tpengine:{name}", text, labels=["model_name"])
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(tuple(histogram.counts)), strict=True))
        family.add_metric([self._model_name], buckets, histogram.total)
        return family
