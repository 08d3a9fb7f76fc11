"""Two engines in one process and on one cluster: at rest both rest, at work neither notices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from support.engines import complete, greedy
from support.models import ModelShop
from support.zoo import ZOO

from executor.ray_engines import cpu_s, executor_of, ray_engine
from tpengine import LLMEngine, SamplingParams

IDLE_S = 2.0
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
    with ray_engine(folders[0], 2) as first, ray_engine(folders[1], 2) as second:
        yield [first, second]


def alone(engine: LLMEngine) -> list[list[int]]:
    return [
        list(complete(engine, prompt, params).token_ids)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def test_both_rest(engines: list[LLMEngine]) -> None:
    """Beside as many actors of Ray's that do nothing at all."""

    class Nobody:
        def pid(self) -> int:
            return os.getpid()

    ranks = [[place.pid for place in executor_of(engine).places] for engine in engines]
    assert len({pid for pids in ranks for pid in pids}) == 4
    nobodies = [ray.remote(num_cpus=0)(Nobody).remote() for _ in range(2)]
    bare = ray.get([nobody.pid.remote() for nobody in nobodies], timeout=30.0)
    for engine in engines:
        complete(engine, [5, 6, 7], greedy(2))
    time.sleep(0.5)
    before = {pid: cpu_s(pid) for pid in (*ranks[0], *ranks[1], *bare)}
    time.sleep(IDLE_S)
    spent = {pid: cpu_s(pid) - before[pid] for pid in before}
    for nobody in nobodies:
        ray.kill(nobody)
    nothing = sum(spent[pid] for pid in bare)
    for pids in ranks:
        own = sum(spent[pid] for pid in pids)
        print(
            f"\nidle: an engine of two ranks {100 * own / IDLE_S:.2f} % of a core, two actors that "
            f"do nothing {100 * nothing / IDLE_S:.2f} %"
        )
        assert own - nothing < 0.01 * IDLE_S


def test_steps_in_turn(engines: list[LLMEngine]) -> None:
    """The same request ids, other models, and a request that one of them aborts."""
    expected = [alone(engine) for engine in engines]
    assert expected[0] != expected[1]
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
