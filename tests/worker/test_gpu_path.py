"""The code path of a GPU (gathered context, a library's kernels, padded decode batches at fixed
addresses), run on the CPU; see `support.gpu_walk`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import generate, greedy, ids, open_llm, preemptions
from support.gpu_walk import GpuWalk, walk_the_gpus_way
from support.models import ModelShop
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN, ZOO

from tpengine.worker.gpu import attention_plans as gpu

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 129, 300)
MAX_MODEL_LEN = 512


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> GpuWalk:
    return walk_the_gpus_way(monkeypatch)


def answers(models: ModelShop, spec: TinyLlama, **args: Any) -> tuple[list[Any], list[Any]]:
    """Returns (ids of the engine, ids of transformers)."""
    folder: Path = models.folder(spec)
    oracle = models.oracle(folder)
    prompts = oracle.prompts(LENGTHS, seed=1)
    with open_llm(folder, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    assert preemptions(outputs) == 0 or "num_device_blocks_override" in args
    return ids(outputs), [answer.token_ids for answer in oracle.answers(prompts)]


@pytest.mark.parametrize("name", ["d64-4to1-tied", "d96-7to1-llama3", "d256-2to1-3-layers"])
def test_padded_decodes_and_gathered_chunks_equal_transformers(
    models: ModelShop, walk: GpuWalk, name: str
) -> None:
    found, expected = answers(models, ZOO[name], max_num_batched_tokens=48)
    assert found == expected
    assert walk.sizes == [1, 2, 4, 8, 16]
    assert walk.replays > 20
    assert walk.gathers > 10


def test_prompts_without_context_are_not_gathered(models: ModelShop, walk: GpuWalk) -> None:
    found, expected = answers(
        models, PLAIN, max_num_batched_tokens=1024, enable_chunked_prefill=False, enforce_eager=True
    )
    assert found == expected
    assert (walk.gathers, walk.replays) == (0, 0)
    assert walk.prefills > 0


def test_more_context_than_scratch_goes_in_groups(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_GATHERED_TOKENS", 64)
    before = models.oracle(models.folder(PLAIN))
    prompts = before.prompts((200, 201, 202, 203), seed=5)
    with open_llm(
        models.folder(PLAIN), max_model_len=300, max_num_batched_tokens=512, max_num_seqs=8
    ) as llm:
        generate(llm, [prompt[:150] for prompt in prompts], greedy(1))
        walk.gathers = 0
        outputs = generate(llm, prompts, greedy(8))
    assert ids(outputs) == [answer.token_ids[:8] for answer in before.answers(prompts)]
    assert walk.gathers > PLAIN.num_layers  # the context of each prompt is gathered separately


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_between_graphs(models: ModelShop, walk: GpuWalk, mode: str) -> None:
    found, expected = answers(
        models,
        PLAIN,
        preemption_mode=mode,
        num_device_blocks_override=MAX_MODEL_LEN // 16 + 4,
        max_num_batched_tokens=64,
    )
    assert found == expected
    assert walk.replays > 20


def test_steps_with_more_rows_than_graphs_run_by_themselves(
    models: ModelShop, walk: GpuWalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpengine.worker.worker.MAX_RECORDED_ROWS", 4)
    found, expected = answers(models, PLAIN)
    assert found == expected
    assert walk.sizes == [1, 2, 4]
    assert 0 < walk.replays < 200
