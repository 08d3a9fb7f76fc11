"""Misuse of an engine, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import run
from support.patches import on_call

from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.errors import EngineError, InvalidPromptError
from tpengine.worker.worker import Worker

TIMEOUT_S = 30


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    args = EngineArgs(dtype="float32", cpu_kv_cache_space=0.1, disable_log_stats=True)
    with LLMEngine.from_engine_args(args) as engine:
        yield engine


def test_a_second_thread_is_refused(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(TIMEOUT_S)

    on_call(monkeypatch, Worker, "execute_model", wait)
    engine.add_request("one", "Hello", SamplingParams(temperature=0.0, max_tokens=3))
    thread = threading.Thread(target=run, args=(engine,))
    thread.start()
    try:
        assert inside.wait(TIMEOUT_S)
        with pytest.raises(EngineError, match="another thread is in a step"):
            engine.step()
    finally:
        go_on.set()
        thread.join(TIMEOUT_S)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("place", ["in a step", "at its very end"])
def test_ctrl_c_loses_none(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The step ends, and the next call returns its outputs."""
    record, execute = engine.counters.record_step, Worker.execute_model

    def interrupted(*args: Any) -> Any:
        done = record(*args) if place == "at its very end" else execute(*args)
        signal.raise_signal(signal.SIGINT)
        return done

    engine.add_request("one", "Hello", SamplingParams(temperature=0.0, max_tokens=1))
    with monkeypatch.context() as patch:
        if place == "in a step":
            patch.setattr(Worker, "execute_model", interrupted)
        else:
            patch.setattr(engine.counters, "record_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = run(engine)
    assert output.finished
    assert len(output.outputs[0].token_ids) == 1


def test_an_aborted_beam_search_shows_how_far_it_came(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, use_beam_search=True, n=2, best_of=2, max_tokens=20)
    engine.add_request("beams", "The capital of France is", params)
    for _ in range(6):
        engine.step()
    engine.abort_request("beams")
    (output,) = run(engine)
    assert len(output.outputs) == 2
    for completion in output.outputs:
        assert completion.finish_reason == "abort"
        assert len(completion.token_ids) >= 4
        assert completion.text == engine.tokenizer.decode(completion.token_ids)


def test_sequences_that_wait_share_their_prompt(engine: LLMEngine) -> None:
    prompt, params = [5] * 2000, SamplingParams(n=64, max_tokens=2)
    engine.add_request("first", None, params, prompt_token_ids=prompt)  # makes what stays
    tracemalloc.start()
    try:
        for number in range(4):
            engine.add_request(str(number), None, params, prompt_token_ids=prompt)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * 64 * len(prompt) * 8 / 4  # their pointers would be four times as much
    outputs = {output.request_id: output for output in run(engine)}
    for output in outputs.values():
        assert output.prompt_token_ids == prompt
        assert {len(completion.token_ids) for completion in output.outputs} == {2}


@pytest.mark.parametrize("request_id", [None, 5, "", ["a"]])
def test_request_ids_are_strings(engine: LLMEngine, request_id: Any) -> None:
    with pytest.raises(InvalidPromptError, match="non-empty string"):
        engine.add_request(request_id, "Hello")
