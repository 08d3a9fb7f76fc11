"""The code path of a GPU (gathered context, a library's kernels, padded decode batches at fixed
addresses), run on the CPU; see `support.gpu_walk`."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import generate, greedy, ids, open_llm, preemptions
from support.gpu_walk import GpuWalk, walk_the_gpus_way
from support.matrix import matrix
from support.models import ModelShop
from support.zoo import PLAIN, ZOO

from tpengine.worker.gpu import attention_plans as gpu

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 129, 300)
MAX_MODEL_LEN = 512
SCARCE = {"num_device_blocks_override": MAX_MODEL_LEN // 16 + 4, "max_num_batched_tokens": 64}
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 48},
    "swap": {"preemption_mode": "swap", **SCARCE},
    "recompute": {"preemption_mode": "recompute", **SCARCE},
    "whole prompts": {"max_num_batched_tokens": 1024, "enable_chunked_prefill": False},
}
NAMES = ("d64-4to1-tied", "d96-7to1-llama3", "d256-2to1-3-layers")


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    return walk_the_gpus_way(monkeypatch)


def check_answers(models: ModelShop, name: str, **args: Any) -> None:
    """Those of the engine are those of transformers."""
    folder, oracle, prompts = models.problem(ZOO[name], LENGTHS, seed=1)
    with open_llm(folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    assert (preemptions(outputs) > 0) == ("num_device_blocks_override" in args)


each_mode = pytest.mark.parametrize(
    ("mode", "name", "enforce_eager"), matrix(list(MODES), NAMES, (False, True))
)


@each_mode
def test_greedy_as_transformers(
    models: ModelShop, walk: GpuWalk, mode: str, name: str, enforce_eager: bool
) -> None:
    check_answers(models, name, enforce_eager=enforce_eager, **MODES[mode])
    assert walk.sizes == ([] if enforce_eager else [1, 2, 4, 8, 16])
    assert (walk.replays > 20) == (not enforce_eager)
    assert (walk.gathers > 10) == (mode != "whole prompts")
    assert walk.prefills > 0
    assert walk.early > 20, "the next step was launched only after the ids had arrived"


def test_more_context_than_scratch_goes_in_groups(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_GATHERED_TOKENS", 64)
    folder, oracle, prompts = models.problem(PLAIN, (200, 201, 202, 203), seed=5)
    args = {"max_model_len": 300, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    with open_llm(folder, **args) as llm:
        generate(llm, [prompt[:150] for prompt in prompts], greedy(1))
        walk.gathers = 0
        outputs = generate(llm, prompts, greedy(8))
    oracle.assert_greedy(prompts, ids(outputs), 8)
    assert walk.gathers > PLAIN.num_layers  # the context of each prompt is gathered separately


def test_steps_with_more_rows_than_graphs_run_by_themselves(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.worker.recorder.MAX_RECORDED_ROWS", 4)
    check_answers(models, NAMES[0])
    assert walk.sizes == [1, 2, 4]
    assert 0 < walk.replays < 200
