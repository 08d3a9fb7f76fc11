"""Pipelines whose ranks are processes: outputs, and the loss of a rank of each stage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import bits, open_engine, serve
from support.models import ModelShop
from support.zoo import ZOO

from executor.ray_engines import FOUR_KINDS, at_step, executor_of, kill_rank, rank_engine
from tpengine import LLMEngine
from tpengine.executor.codec import encode
from tpengine.messages import StepInput, StepOutput


def answers(engine: LLMEngine, prompts: list[list[int]], kill: Any = lambda: None) -> list[Any]:
    """What each request gets; `kill` is called when the first one has some tokens."""
    outputs = serve(engine, prompts, FOUR_KINDS, after_step=at_step(20, kill))
    return list(map(bits, outputs))


Stages = tuple[LLMEngine, list[list[int]], list[Any]]


@pytest.fixture(scope="module")
def stages(models: ModelShop) -> Iterator[Stages]:
    """Three stages, each of one rank, for all tests; prompts, and the answers of one process."""
    folder = models.folder(ZOO["d256-2to1-3-layers"])
    prompts = models.oracle(folder).prompts((40, 7, 19, 3), seed=3)
    with open_engine(folder, num_device_blocks_override=64) as engine:
        expected = answers(engine, prompts)
    with rank_engine(folder, 1, pipeline_parallel_size=3, num_device_blocks_override=64) as engine:
        yield engine, prompts, expected


def test_each_stage_is_told_apart(stages: Stages) -> None:
    ledgers = stages[0].stats().ledgers
    assert [ledger.rank for ledger in ledgers] == [0, 1, 2]
    assert [entry.stage for entry in ledgers] == [f"stage {i}: layer {i} of 3" for i in range(3)]
    assert all(ledger.graphs_bytes > 0 for ledger in ledgers), "decode steps are not recorded"
    assert all(ledger.communicator_bytes > 0 for ledger in ledgers[:2])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("rank", range(3))
def test_a_lost_rank_of_any_stage(stages: Stages, rank: int, number: int) -> None:
    """Tokens and log probabilities are those of one process, with and without the loss."""
    engine, prompts, expected = stages
    assert answers(engine, prompts) == expected
    count = len(engine.recoveries)
    assert answers(engine, prompts, lambda: kill_rank(engine, rank, number)) == expected
    assert len(engine.recoveries) == count + 1
    assert engine.recoveries[-1].loss.rank == rank


def test_an_adapter_that_one_stage_cannot_load(stages: Stages, monkeypatch: Any) -> None:
    """Its error comes with the answer of its own stage."""
    executor = executor_of(stages[0])
    others = [StepOutput(1, [], load_results={b"key": "rank 1: no"}), StepOutput(1, [7])]
    payloads = [encode(StepOutput(1, [])), *map(encode, others)]
    monkeypatch.setattr(executor._group, "take_answers", lambda timeout_s: payloads)
    monkeypatch.setattr(executor._mirror, "follow", lambda *_: None)
    executor._unanswered.append(StepInput(1, [], []))
    answer = executor.take_answer()
    assert (answer.token_ids, answer.load_results) == ([7], {b"key": "rank 1: no"})
