"""What an engine reports about itself: counters, metrics, and a log line for each request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engines import greedy
from support.event_loop import run_async

from async_engine.conftest import MakeEngine
from async_engine.tools import last_output, read_ids, stream, until
from tpengine import AsyncLLMEngine, RequestOutputKind
from tpengine.async_engine.admission import QueueLimits
from tpengine.engine.stats import RateMeter
from tpengine.errors import InvalidPromptError

SECRET = "the password is swordfish"
NONE = """num_requests_running num_requests_waiting num_requests_swapped kv_cache_usage_perc
    num_preemptions_total recoveries_total prefix_cache_hits_total"""
EXPECTED = dict.fromkeys(NONE.split(), 0) | {
    "prompt_tokens_total": 64, "generation_tokens_total": 40, "prefix_cache_queries_total": 64,
    "request_success_total length": 4, "engine_state running": 1, "engine_state dead": 0,
    "time_to_first_token_seconds_count": 4, "inter_token_latency_seconds_count": 36,
    "e2e_request_latency_seconds_count": 4, "request_queue_time_seconds_count": 4,
    "request_prompt_tokens_bucket 8.0": 0, "request_prompt_tokens_bucket 16.0": 4,
    "request_prompt_tokens_sum": 64, "request_generation_tokens_sum": 40,
}  # fmt: skip
"""Metrics, each with its label but `model_name`, after four requests of 16 and 10 tokens."""


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The log lines about requests."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tpengine.async_engine.request_table")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def _samples(engine: AsyncLLMEngine) -> dict[tuple[str, str], float]:
    """Returns the metrics by name and by the label other than `model_name`."""
    samples = {}
    for family in text_string_to_metric_families(engine.metrics_text("m").decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            samples[sample.name, ",".join(labels.values())] = sample.value
    return samples


async def test_counters_add_up(make: MakeEngine) -> None:
    engine = make(QueueLimits(max_requests=8))
    shared = [9] * 40
    assert len(await read_ids(engine, shared, stream(20))) == 20
    assert len(await read_ids(engine, [*shared, 5], stream(20))) == 20  # finds 2 blocks of 16
    with pytest.raises(InvalidPromptError):
        await read_ids(engine, [], stream(3))
    reader = asyncio.create_task(read_ids(engine, [7], stream(600), request_id="it"))
    await until(lambda: engine.stats().queues.num_running == 1)
    running = engine.stats()
    assert running.cache.usage > 0
    assert running.cache.num_free_blocks < running.cache.num_total_blocks == 256
    await engine.abort("it")
    assert len(await reader) < 600
    stats = engine.stats()
    assert (stats.state, stats.epoch, stats.recoveries) == ("running", 1, 0)
    assert stats.finished == {"length": 2, "abort": 1}
    assert stats.refused == {"InvalidPromptError": 1}
    assert stats.prompt_tokens in (81, 82)  # the last may have been aborted before its first token
    assert stats.cache.prefix_hits == 32
    assert stats.output_tokens >= 40
    assert stats.num_steps >= 40
    parts = stats.step_seconds
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert parts["model"] <= parts["execute"]
    assert [ledger.num_device_blocks for ledger in stats.ledgers] == [256]
    assert len(stats.devices) == 1


async def test_metrics_have_the_usual_names(make: MakeEngine) -> None:
    engine = make(QueueLimits(max_requests=8))
    await asyncio.gather(*(read_ids(engine, [i + 4] * 16, stream(10)) for i in range(4)))
    samples = _samples(engine)
    for name, value in EXPECTED.items():
        name, _, label = name.partition(" ")
        assert samples[f"tpengine:{name}", label] == value, name
    for part in ("schedule", "execute", "model", "process", "update", "hand_over"):
        assert samples["tpengine:step_seconds_total", part] > 0
    steps = samples["tpengine:engine_steps_total", ""]
    assert samples["tpengine:iteration_tokens_total_count", ""] == steps
    assert samples["tpengine:e2e_request_latency_seconds_sum", ""] > 0


def test_engines_have_metrics_of_their_own(make: MakeEngine) -> None:
    first, second = make(), make()
    run_async(read_ids(first, [5], stream(4)))
    key = ("tpengine:generation_tokens_total", "")
    assert [_samples(engine)[key] for engine in (first, second)] == [4, 0]


async def test_one_line_per_request_and_no_prompt_in_it(make: MakeEngine, lines: list[str]) -> None:
    engine = make()  # its prefix cache is empty
    assert (await last_output(engine, SECRET, greedy(5), "first")).prompt == SECRET
    outputs = engine.generate(SECRET, stream(300), "second\nforged")
    await anext(outputs)
    await outputs.aclose()
    with pytest.raises(InvalidPromptError):
        await last_output(engine, None, greedy(5), "third", prompt_token_ids=[-1])
    whole = replace(stream(300), output_kind=RequestOutputKind.FINAL_ONLY)
    task = asyncio.create_task(last_output(engine, SECRET, whole, "fourth"))
    before = engine.stats().output_tokens
    # A step of the second request may still be counted after it has left: one token of it.
    await until(lambda: engine.stats().output_tokens > before + 2)
    task.cancel()
    await asyncio.wait([task])
    first, second, third, fourth = lines
    assert first.startswith("request 'first': length after ")
    assert "prompt tokens 20 (0 cached), output tokens 5, preemptions 0" in first
    assert second.startswith("request 'second\\nforged': left by its reader after ")
    assert third.startswith("request 'third': refused: InvalidPromptError after ")
    assert re.search(r"output tokens [1-9]", fourth), fourth  # though its reader got none
    assert "swordfish" not in "".join(lines)


def test_lines_about_requests_can_be_left_out(make: MakeEngine, lines: list[str]) -> None:
    run_async(last_output(make(log_requests=False), SECRET, greedy(2)))
    assert not lines


def test_rates_are_of_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tpengine.engine.stats.time.monotonic", lambda: now[0])
    meter = RateMeter()
    assert meter.rate() == 0
    for _ in range(20):  # 10 per second
        meter.add(5)
        now[0] += 0.5
    assert meter.rate() == 10
    now[0] += 3
    assert meter.rate() == 4
    now[0] += 3
    assert meter.rate() == 0
