"""Ranks as actors give the tokens that transformers and one rank give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from families.variants import VARIANTS
from support.engines import make_engine, run
from support.models import ModelShop
from support.oracle import Oracle
from support.step_log import log_steps
from support.zoo import PLAIN

from executor.ray_engines import executor_of, is_alive, ray_engine
from tpengine import LLMEngine, SamplingParams

LENGTHS = (200, 61, 17, 1)
NUM_TOKENS = 64
BLOCK_SIZE = 16
CHUNK = 32
JUST_ONE = -(-(max(LENGTHS) + NUM_TOKENS) // BLOCK_SIZE) + 1
"""Blocks that hold the longest sequence and hardly anything beside it."""
ARGS: dict[str, Any] = {
    "max_model_len": max(LENGTHS) + NUM_TOKENS,
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": CHUNK,
    "num_device_blocks_override": JUST_ONE,
    "swap_space": 0.01,
}
OPT = next(variant for variant in VARIANTS if variant.model_type == "opt")


@pytest.fixture(scope="module")
def opt_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opt") / "model"
    OPT.write(folder)
    return folder


@pytest.fixture(scope="module", params=["llama-1", "llama-2", "llama-4", "opt-2"])
def engine(
    request: pytest.FixtureRequest, ray_address: str, models: ModelShop, opt_folder: Path
) -> Iterator[tuple[LLMEngine, Path]]:
    """An engine with a small cache, and its model's folder; its ranks are gone afterwards."""
    family, _, tp_size = request.param.partition("-")
    folder = models.folder(PLAIN) if family == "llama" else opt_folder
    engine = ray_engine(folder, int(tp_size), **ARGS)
    executor = executor_of(engine)
    times = ", ".join(f"{name} {spent:.2f}" for name, spent in executor.start_times_s.items())
    print(f"\nstart of {request.param}: {sum(executor.start_times_s.values()):.2f} s ({times})")
    yield engine, folder
    places = executor.places
    assert len(places) == int(tp_size)
    assert all(is_alive(places))
    engine.shutdown()
    assert not any(is_alive(places))
    assert ray.is_initialized(), "a Ray that the engine did not start was shut down"


def answers(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[list[int]]]:
    """Ids of all sequences of each request, served together."""
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), None, one, prompt_token_ids=list(prompt))
    done = {output.request_id: output for output in run(engine) if output.finished}
    assert [done[str(i)].error for i in range(len(prompts))] == [None] * len(prompts)
    assert engine.num_free_blocks == engine.num_total_blocks
    return [[list(o.token_ids) for o in done[str(i)].outputs] for i in range(len(prompts))]


def test_greedy_chunked_and_preempted(engine: tuple[LLMEngine, Path], models: ModelShop) -> None:
    ray_engine, folder = engine
    oracle: Oracle = models.oracle(folder)
    prompts = oracle.prompts(LENGTHS, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with log_steps() as log:
        found = answers(ray_engine, prompts, [params] * len(prompts))
    assert log.num_preemptions > 0
    assert log.num_partial_chunks > 0
    assert log.num_mixed_steps > 0
    expected = oracle.answers(prompts)
    assert len({token for answer in expected for token in answer.token_ids}) >= 20
    assert found == [[answer.token_ids] for answer in expected]


def test_several_sequences_and_a_beam(engine: tuple[LLMEngine, Path], models: ModelShop) -> None:
    """Equal to the same requests in one process; sampled ones, too, as their noise is the same."""
    ray_engine, folder = engine
    prompts = models.oracle(folder).prompts(LENGTHS[1:], seed=4)
    params = [
        SamplingParams(n=3, temperature=0.8, seed=5, max_tokens=48, ignore_eos=True),
        SamplingParams(
            use_beam_search=True, best_of=3, n=2, temperature=0.0, max_tokens=48, logprobs=2
        ),
        SamplingParams(temperature=1.0, top_k=20, seed=6, max_tokens=48, prompt_logprobs=1),
    ]
    with make_engine(folder, **ARGS) as local:
        expected = answers(local, prompts, params)
    with log_steps() as log:
        found = answers(ray_engine, prompts, params)
    assert [len(ids) for ids in found] == [3, 2, 1]
    assert found == expected
    assert log.num_preemptions > 0, "the cache was to be too small"


def test_ranks_import_no_transformers(engine: tuple[LLMEngine, Path]) -> None:
    group = executor_of(engine[0])._require_group()
    for modules in group.call_each("modules", lambda _, actor: actor.loaded_modules.remote()):
        assert "torch" in modules
        assert "transformers" not in modules
