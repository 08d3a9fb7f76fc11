"""Every family, models on transformers' code and a GGUF file through Ray: ranks as actors give the
tokens of transformers and of one process in float32, however they come to them.

Starting actors takes seconds and loading a small model milliseconds, so that one group of ranks
takes one model after the other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from support.engines import greedy, make_engine, serve
from support.gguf_files import write_gguf
from support.matrix import matrix
from support.models import ModelShop
from support.step_log import StepLog, log_steps
from support.variants import VARIANTS, Variant

from executor.ray_engines import executor_of, is_alive, rank_engine
from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.config import EngineConfig
from tpengine.executor.executor import Executor
from tpengine.executor.group_executor import GroupExecutor
from tpengine.messages import StepInput, StepOutput
from tpengine.scheduling.drafter import RowPrices

LENGTHS = (90, 61, 17, 1)
NUM_TOKENS = 40
BLOCK_SIZE = 16
LONGEST = max(LENGTHS) + NUM_TOKENS
SIZES = {"max_model_len": LONGEST, "block_size": BLOCK_SIZE, "swap_space": 0.01}
JUST_ONE = -(-LONGEST // BLOCK_SIZE) + 1
"""Blocks that hold the longest sequence and hardly anything else."""
JUST_THREE = 18
"""Likewise for three sequences of one request, which share a prompt."""
FAMILIES = {
    variant.model_type: variant
    for variant in reversed(VARIANTS)  # the first of each
}
FORCED, STARCODER = "llama on transformers' code", "starcoder2"
OTHERS = {
    name: Variant(name, name.partition(" ")[0], FAMILIES["llama"].config | fields)
    for name, fields in {
        "cohere": {"num_key_value_heads": 4, "logit_scale": 0.5},
        FORCED: {"num_key_value_heads": 4},
        STARCODER: {"num_key_value_heads": 4, "sliding_window": None, "norm_epsilon": 1e-4},
    }.items()
}
"""All on transformers' code, the last one from a GGUF file."""
MODES: dict[str, dict[str, Any]] = {
    "whole, drafts": {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 256,
        "speculative_model": "[suffix]",
    },
    "chunked, recompute": {"max_num_batched_tokens": 32, "preemption_mode": "recompute"},
    "chunked, swap": {"max_num_batched_tokens": 32, "preemption_mode": "swap"},
}


class TakenOver(Executor):
    """Ranks that another engine started, with another model."""

    def __init__(self, ranks: Executor, config: EngineConfig) -> None:
        super().__init__()
        self._ranks = ranks
        self._config = config

    def load(self) -> list[str]:
        self._run_workers("__setattr__", "_config", self._config)
        self._run_workers("__setattr__", "_memory", None)  # it holds the other model
        return super().load()

    def send_step(self, step: StepInput) -> None:
        self._ranks.send_step(step)

    def take_answer(self) -> StepOutput:
        return self._ranks.take_answer()

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._ranks._run_workers(method, *args, **kwargs)

    def shutdown(self) -> None:
        """Others take the ranks over."""


RANKS = ((1, "processes"), (2, "ray"), (4, "processes"))


@pytest.fixture(scope="module")
def groups(ray_address: str, family_folders: dict[str, Path]) -> Iterator[Any]:
    """A group of each size, started when it is first asked for.

    pytest would end a fixture with parameters after each row of a matrix.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def group(size_and_name: tuple[int, str]) -> GroupExecutor:
            size, name = size_and_name
            engine = rank_engine(family_folders["llama"], size, executor=name)
            executors.append(executor_of(stack.enter_context(engine)))
            return executors[-1]

        executors: list[GroupExecutor] = []
        yield group
        places = [place for executor in executors for place in executor.places]
        assert all(is_alive(places))
    assert not any(is_alive(places))
    assert ray.is_initialized(), "a Ray that the engine did not start was shut down"


@pytest.fixture
def ranks(request: pytest.FixtureRequest, groups: Any) -> GroupExecutor:
    executor = groups(request.param)
    assert len(executor.places) == request.param[0]
    return executor


@pytest.fixture(scope="module")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all models; one of a GGUF file is in the folder beside it."""
    root = tmp_path_factory.mktemp("families")
    for family, variant in (FAMILIES | OTHERS).items():
        variant.write(root / family)
    folders = {name: root / name for name in (FAMILIES | OTHERS)}
    return folders | {STARCODER: write_gguf(root / STARCODER, root / f"{STARCODER}.gguf")}


def taken_over(ranks: Executor, folder: Path, **args: Any) -> LLMEngine:
    """An engine with ranks that take this model over."""
    model_impl = "transformers" if folder.stem in OTHERS else "tpengine"
    args = {"tensor_parallel_size": len(ranks.nodes), "model_impl": model_impl, **SIZES, **args}
    args |= {"executor": "ray", "dtype": "float32", "device": "cpu", "async_scheduling": True}
    config = EngineArgs(str(folder), **args).create_engine_config("cpu")
    return LLMEngine(config, TakenOver(ranks, config), log_stats=False)


def generate(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[list[int]]], StepLog]:
    """Ids of all sequences of each request, served together, and what the scheduler did."""
    with log_steps() as log:
        outputs = serve(engine, prompts, params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[list(o.token_ids) for o in output.outputs] for output in outputs], log


@pytest.mark.parametrize(
    ("ranks", "mode", "family"),
    matrix(RANKS, list(MODES), [*FAMILIES, *OTHERS]),
    indirect=["ranks"],
    ids=str,
)
def test_greedy(
    ranks: Any, mode: str, family: str, family_folders: Any, models: ModelShop, monkeypatch: Any
) -> None:
    """Prompts that come again find their beginnings in the cache, and are answered from drafts."""
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.02))
    folder = family_folders[family]
    oracle = models.oracle(folder.with_suffix(""))
    prompts = oracle.random_prompts(LENGTHS, seed=7)
    params = [greedy(NUM_TOKENS)] * len(prompts)
    num_blocks = 64 if "drafts" in mode else JUST_ONE
    engine = taken_over(ranks, folder, num_device_blocks_override=num_blocks, **MODES[mode])
    answers, log = generate(engine, prompts, params)
    oracle.assert_greedy(prompts, [ids for [ids] in answers], NUM_TOKENS)
    assert len({token for [ids] in answers for token in ids}) >= 15
    if "drafts" in mode:
        assert log.num_partial_chunks == log.num_preemptions == 0
        assert generate(engine, prompts, params)[0] == answers
        assert engine.stats().cache.prefix_hits > 0
        assert engine.stats().drafts["earlier", 7].num_accepted > 0
    else:
        assert log.num_partial_chunks > 0
        assert log.num_mixed_steps > 0
        log.assert_only(MODES[mode]["preemption_mode"])


@pytest.mark.parametrize("ranks", RANKS[1:], indirect=True, ids=str)
def test_functions_of_the_user(
    ranks: Any, family_folders: Any, models: ModelShop, tmp_path: Path, monkeypatch: Any
) -> None:
    """One process calls them; ranks get copies, and one that they cannot load ends its request."""
    folder = family_folders["llama"]
    prompts = models.oracle(folder).prompts(LENGTHS[2:], seed=4)
    offsets = [3, 0, 5]

    def thin(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
        logits[(prompt_ids[0] + offsets[len(output_ids) % 3]) % 7 :: 2] = -float("inf")
        return logits

    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    params = [replace(plain, logits_processors=[thin]), plain]
    args = {"num_device_blocks_override": JUST_THREE}
    with make_engine(folder, max_model_len=LONGEST, block_size=BLOCK_SIZE, **args) as local:
        expected, _ = generate(local, prompts, params)
        assert generate(local, prompts[:1], [plain])[0] != expected[:1]
    engine = taken_over(ranks, folder, **args)
    assert generate(engine, prompts, params)[0] == expected
    (tmp_path / "only_here.py").write_text("def keep(output_ids, logits):\n    return logits\n")
    monkeypatch.syspath_prepend(tmp_path)
    missing = replace(plain, logits_processors=[importlib.import_module("only_here").keep])
    failed, other = serve(engine, [prompts[1]] * 2, [missing, plain])
    assert "No module named 'only_here'" in failed.error
    assert [list(completion.token_ids) for completion in other.outputs] == expected[1]
