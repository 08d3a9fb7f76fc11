"""Every family through Ray: the tokens of transformers in float32, however ranks come to them.

Starting actors takes seconds and loading a small model milliseconds, so that one group of ranks
takes one model after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families.variants import VARIANTS
from support.engines import run
from support.models import ModelShop
from support.oracle import Answer
from support.step_log import StepLog, log_steps

from executor.ray_engines import executor_of, ray_engine
from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.config import EngineConfig
from tpengine.executor.executor import Executor
from tpengine.messages import StepInput, StepOutput

LENGTHS = (90, 61, 17, 1)
NUM_TOKENS = 40
BLOCK_SIZE = 16
LONGEST = max(LENGTHS) + NUM_TOKENS
JUST_ONE = -(-LONGEST // BLOCK_SIZE) + 1
"""Blocks that hold the longest sequence and hardly anything beside it."""
FAMILIES = {
    variant.model_type: variant
    for variant in reversed(VARIANTS)  # the first of each
}
MODES: dict[str, dict[str, Any]] = {
    "whole": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "chunked, recompute": {"max_num_batched_tokens": 32, "preemption_mode": "recompute"},
    "chunked, swap": {"max_num_batched_tokens": 32, "preemption_mode": "swap"},
}


class TakenOver(Executor):
    """Ranks that another engine started, with another model."""

    def __init__(self, ranks: Executor, config: EngineConfig) -> None:
        self._ranks = ranks
        self._config = config

    def load(self) -> list[str]:
        self._run_workers("__setattr__", "_config", self._config)
        return super().load()

    def execute_model(self, step: StepInput) -> StepOutput:
        return self._ranks.execute_model(step)

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._ranks._run_workers(method, *args, **kwargs)

    def shutdown(self) -> None:
        """Others take the ranks over."""


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, ray_address: str, family_folders: dict[str, Path]
) -> Iterator[Executor]:
    with ray_engine(family_folders["llama"], request.param) as engine:
        yield executor_of(engine)


@pytest.fixture(scope="module")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family."""
    root = tmp_path_factory.mktemp("families")
    for family, variant in FAMILIES.items():
        variant.write(root / family)
    return {family: root / family for family in FAMILIES}


def generate(
    ranks: Executor, folder: Path, prompts: list[list[int]], **args: Any
) -> tuple[list[list[int]], StepLog]:
    """Greedy ids from ranks that take this model over, and what the scheduler did."""
    engine_args = EngineArgs(
        str(folder),
        tensor_parallel_size=len(ranks.nodes),
        executor="ray",
        dtype="float32",
        device="cpu",
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        swap_space=0.01,
        **args,
    )
    config = engine_args.create_engine_config("cpu")
    engine = LLMEngine(config, TakenOver(ranks, config), log_stats=False)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), None, params, prompt_token_ids=list(prompt))
    with log_steps() as log:
        done = {output.request_id: output for output in run(engine) if output.finished}
    assert engine.num_free_blocks == engine.num_total_blocks
    return [list(done[str(i)].outputs[0].token_ids) for i in range(len(prompts))], log


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(
    family: str, ranks: Executor, family_folders: dict[str, Path], models: ModelShop
) -> None:
    folder = family_folders[family]
    oracle = models.oracle(folder)
    prompts = oracle.prompts(LENGTHS, seed=7)
    answers: list[Answer] = oracle.answers(prompts)
    expected = [answer.token_ids[:NUM_TOKENS] for answer in answers]
    assert len({token for ids in expected for token in ids}) >= 20
    for mode, args in MODES.items():
        num_blocks = 64 if mode == "whole" else JUST_ONE
        found, log = generate(ranks, folder, prompts, num_device_blocks_override=num_blocks, **args)
        assert found == expected, mode
        if mode == "whole":
            assert log.num_partial_chunks == log.num_preemptions == 0
        else:
            assert log.num_partial_chunks > 0
            log.assert_only(args["preemption_mode"])
