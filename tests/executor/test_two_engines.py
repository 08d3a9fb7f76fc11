"""Two engines in one process and a third in another: none notices the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import complete, greedy
from support.models import ModelShop
from support.zoo import ZOO

from executor.driver_process import driver_process
from executor.ray_engines import rank_engine, ray_engine
from tpengine import LLMEngine, SamplingParams

NUM_TOKENS = 24
PROMPTS = ([5, 6, 7], [300, 8, 9, 10, 11], list(range(20, 70)))
PARAMS = (
    greedy(NUM_TOKENS),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    greedy(NUM_TOKENS, repetition_penalty=1.2),
)
MODELS = (ZOO["d64-4to1-tied"], ZOO["d256-2to1-3-layers"])


@pytest.fixture(scope="module")
def engines(ray_address: str, models: ModelShop) -> Iterator[list[LLMEngine]]:
    """Of two ranks each, with models of their own."""
    folders: list[Path] = [models.folder(spec) for spec in MODELS]
    with ray_engine(folders[0], 2) as first, rank_engine(folders[1], 2) as second:
        yield [first, second]


def alone(engine: LLMEngine) -> list[list[int]]:
    return [
        list(complete(engine, prompt, params).token_ids)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_steps_in_turn(engines: list[LLMEngine], ray_address: str, models: ModelShop) -> None:
    """The same request ids, other models, a request that one of them aborts, and a third engine in
    another process; one ends before the other."""
    expected = [alone(engine) for engine in engines]
    assert expected[0] != expected[1]
    with driver_process("driver.py", models.folder(MODELS[0]), ray_address, 1, "once") as driver:
        driver.hear()  # its ranks are there
        for engine in engines:
            for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
                engine.add_request(str(i), None, params, prompt_token_ids=list(prompt))
        engines[0].add_request("aborted", None, greedy(200), prompt_token_ids=[1, 2, 3])
        found: list[dict[str, list[int]]] = [{}, {}]
        turns = 0
        while any(engine.has_unfinished_requests() for engine in engines):
            for engine, ids in zip(engines, found, strict=True):
                for output in engine.step():
                    ids[output.request_id] = list(output.outputs[0].token_ids)
            turns += 1
            if turns == 5:
                engines[0].abort_request("aborted")
            assert turns < 500
        assert 0 < len(found[0].pop("aborted")) < 10
        for ids, wanted in zip(found, expected, strict=True):
            assert [ids[str(i)] for i in range(len(PROMPTS))] == wanted
        for engine in engines:
            assert engine.num_free_blocks == engine.num_total_blocks
        assert driver.hear()[:NUM_TOKENS] == expected[0][0]
        assert driver.process.wait(60.0) == 0
    engines[1].shutdown()
    assert alone(engines[0]) == expected[0]
