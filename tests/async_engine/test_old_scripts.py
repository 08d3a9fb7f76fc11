"""The part of `AsyncLLMEngine` that only programs written for vLLM 0.5.4 use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import greedy
from support.event_loop import run_async
from tpengine.engine.async_llm_engine import AsyncEngineDeadError
from tpengine.engine.metrics import StatLoggerBase, Stats
from tpengine.lora.request import LoRARequest
from tpengine.usage.usage_lib import UsageContext

from async_engine.tools import collect, last_output, read_ids, until
from tpengine import AsyncEngineArgs, AsyncLLMEngine, LLMEngine, SamplingParams, errors


class Noted(StatLoggerBase):
    """A logger that keeps what it gets, and the thread that it is called on."""

    def __init__(self) -> None:
        super().__init__(local_interval=1)
        self.stats: list[tuple[str, Stats]] = []

    def log(self, stats: Stats) -> None:
        self.stats.append((threading.current_thread().name, stats))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncLLMEngine]:
    sizes = {"num_device_blocks_override": 64, "max_model_len": 256}
    args = AsyncEngineArgs(str(folder), dtype="float32", disable_log_requests=True, **sizes)
    made = AsyncLLMEngine.from_engine_args(args, False, UsageContext.API_SERVER, None)
    made.start_background_loop()
    yield made
    run_async(made.shutdown())


async def test_configs_and_the_tokenizer(engine: AsyncLLMEngine) -> None:
    assert (await engine.get_model_config()).max_model_len == 256
    assert await engine.get_model_config() is engine.engine.get_model_config()
    assert (await engine.get_parallel_config()).tensor_parallel_size == 1
    assert (await engine.get_scheduler_config()).max_model_len == 256
    assert await engine.get_lora_config() is None
    assert (await engine.get_tokenizer()).encode("hello") == await engine.tokenize("hello")
    await engine.check_health()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)


async def test_a_request_by_its_positions(engine: AsyncLLMEngine) -> None:
    arrival_time = time.time() - 100
    prompt = {"prompt_token_ids": [5, 6, 7]}
    request = await engine.add_request("a", prompt, greedy(4), arrival_time, None, None, None)
    with pytest.raises(errors.DuplicateRequestError):
        await engine.add_request("a", prompt, greedy(4))
    added = await collect(request)
    assert [output.finished for output in added] == [False] * (len(added) - 1) + [True]
    assert added[-1].metrics.arrival_time == arrival_time
    output = await last_output(engine, prompt, greedy(4), "b", None, None, None)
    assert output.outputs[0].token_ids == added[-1].outputs[0].token_ids


async def test_a_stream_that_is_not_read_goes_on(engine: AsyncLLMEngine) -> None:
    request = await engine.add_request("a", "hello", greedy(8))
    await read_ids(engine, [5], greedy(30))
    assert request.finished
    assert len([output async for output in request][-1].outputs[0].token_ids) == 8
    with pytest.raises(errors.InvalidPromptError, match="empty"):
        await engine.add_request("a", {"prompt_token_ids": []}, greedy(8))


@pytest.mark.parametrize(("name", "value"), [("trace_headers", {}), ("prompt_adapter_request", 1)])
async def test_what_is_not_served_is_refused(engine: AsyncLLMEngine, name: str, value: Any) -> None:
    with pytest.raises(errors.InvalidPromptError, match=name):
        engine.generate("a", SamplingParams(), "it", **{name: value})
    with pytest.raises(errors.InvalidPromptError, match=name):
        await engine.add_request("it", "a", SamplingParams(), **{name: value})
    with pytest.raises(errors.InvalidSamplingParamsError, match=r"must be SamplingParams, got \{"):
        engine.generate("a", {"n": 2})
    adapter = LoRARequest("adapter", 1, "/folder")
    with pytest.raises(errors.InvalidAdapterError, match=r"LoRARequest\(.* no adapters; make it"):
        await engine.add_request("it", "a", SamplingParams(), lora_request=adapter)


METHODS: list[Any] = [AsyncLLMEngine.generate, AsyncLLMEngine.add_request, LLMEngine.add_request]
NOW_IDS = r'\[5, 9\] .* before vLLM 0\.4\.3; write inputs=\{"prompt_token_ids": \[\.\.\.\]\}$'


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_arguments_of_the_first_versions_are_named(method: Any) -> None:
    for words, values, named in (
        (NOW_IDS, (None, "a", "b", greedy(2), [5, 9]), {}),
        (rf"{method.__qualname__}: prompt = 'a' .*; write inputs=", (), {"prompt": "a"}),
    ):
        with pytest.raises(errors.InvalidPromptError, match=words):
            method(*values, **named)
    with pytest.raises(errors.InvalidPromptError, match="write params="):
        LLMEngine.add_request(None, "a", sampling_params=greedy(2))  # type: ignore


@pytest.mark.parametrize("kwargs", [{}, {"worker_use_ray": False, "log_stats": True}])
def test_the_constructor_of_vllm_is_refused(kwargs: Any) -> None:
    positions = () if kwargs else (False, False)
    with pytest.raises(errors.ConfigError, match=r"use AsyncLLMEngine\.from_engine_args"):
        AsyncLLMEngine(*positions, **kwargs)


def test_loggers_are_called_on_the_engines_thread(engine: AsyncLLMEngine) -> None:
    noted = Noted()

    async def ask() -> None:
        engine.add_logger("mine", noted)
        with pytest.raises(KeyError):
            engine.add_logger("mine", noted)
        await read_ids(engine, [5], greedy(3))
        number = len(noted.stats)
        await engine.do_log_stats()
        await until(lambda: len(noted.stats) > number)
        engine.remove_logger("mine")
        number = len(noted.stats)
        await read_ids(engine, [5], greedy(3))
        assert number == len(noted.stats) >= 4
        with pytest.raises(KeyError):
            engine.remove_logger("mine")

    run_async(ask())
    assert {thread for thread, _ in noted.stats} == {"tpengine-engine"}
    assert sum(stats.num_generation_tokens_iter for _, stats in noted.stats) == 3


async def test_an_engine_that_has_ended(folder: Path) -> None:
    args = AsyncEngineArgs(str(folder), dtype="float32", num_device_blocks_override=64)
    noted = Noted()
    engine = AsyncLLMEngine.from_engine_args(args, stat_loggers={"mine": noted})
    await read_ids(engine, [5], greedy(3))
    await engine.shutdown()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, False)
    with pytest.raises(AsyncEngineDeadError):
        engine.start_background_loop()
    with pytest.raises(AsyncEngineDeadError):
        await engine.check_health()
    with pytest.raises(AsyncEngineDeadError):
        await engine.do_log_stats()
    assert noted.stats
