"""Pipelines whose ranks are processes: outputs, and the loss of a rank of each stage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import open_engine, serve
from support.models import ModelShop
from support.zoo import ZOO

from executor.ray_engines import at_step
from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.executor.codec import encode
from tpengine.executor.group_executor import GroupExecutor
from tpengine.messages import StepInput, StepOutput

THREE = ZOO["d256-2to1-3-layers"]
FIELDS = {"dtype": "float32", "device": "cpu", "num_device_blocks_override": 64}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(n=2, best_of=2, use_beam_search=True, temperature=0.0, max_tokens=24),
]
LENGTHS = (40, 7, 19, 3)


def answers(engine: LLMEngine, prompts: list[list[int]], kill: Any = lambda: None) -> list[Any]:
    """What each request gets; `kill` is called when the first one has some tokens."""
    outputs = serve(engine, prompts, PARAMS, after_step=at_step(20, kill))
    return [
        [(o.token_ids, o.cumulative_logprob, o.logprobs) for o in output.outputs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def folder(models: ModelShop) -> Path:
    return models.folder(THREE)


@pytest.fixture(scope="module")
def prompts(models: ModelShop, folder: Path) -> list[list[int]]:
    return models.oracle(folder).prompts(LENGTHS, seed=3)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[Any]:
    """By one process."""
    with open_engine(folder, num_device_blocks_override=64) as engine:
        return answers(engine, prompts)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    """Three stages, each of one rank, for all tests."""
    args = EngineArgs(str(folder), pipeline_parallel_size=3, executor="processes", **FIELDS)
    with LLMEngine.from_engine_args(args) as engine:
        yield engine


def test_each_stage_is_told_apart(engine: LLMEngine) -> None:
    ledgers = engine.stats().ledgers
    assert [ledger.rank for ledger in ledgers] == [0, 1, 2]
    assert [entry.stage for entry in ledgers] == [f"stage {i}: layer {i} of 3" for i in range(3)]
    assert all(ledger.graphs_bytes > 0 for ledger in ledgers), "decode steps are not recorded"
    assert all(ledger.communicator_bytes > 0 for ledger in ledgers[:2])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("rank", range(3))
def test_a_lost_rank_of_any_stage(
    engine: LLMEngine,
    prompts: list[list[int]],
    expected: list[Any],
    rank: int,
    number: signal.Signals,
) -> None:
    """Tokens and log probabilities are those of one process, with and without the loss."""
    executor = engine._executor
    assert isinstance(executor, GroupExecutor)
    assert answers(engine, prompts) == expected
    count = len(engine.recoveries)
    outputs = answers(engine, prompts, lambda: os.kill(executor.places[rank].pid, number))
    assert outputs == expected
    assert len(engine.recoveries) == count + 1
    assert engine.recoveries[-1].loss.rank == rank


def test_an_adapter_that_one_stage_cannot_load(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error comes with the answer of its own stage."""
    executor = engine._executor
    assert isinstance(executor, GroupExecutor)
    stages = [StepOutput(1, [], load_results={b"key": "rank 1: no"}), StepOutput(1, [7])]
    payloads = [encode(StepOutput(1, [])), *map(encode, stages)]
    monkeypatch.setattr(executor._group, "take_answers", lambda timeout_s: payloads)
    monkeypatch.setattr(executor._mirror, "follow", lambda *_: None)
    executor._unanswered.append(StepInput(1, [], []))
    answer = executor.take_answer()
    assert (answer.token_ids, answer.load_results) == ([7], {b"key": "rank 1: no"})
