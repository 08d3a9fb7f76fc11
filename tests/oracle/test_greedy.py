"""Greedy ids equal to transformers in float32: models, prompt lengths, blocks, chunks."""

from __future__ import annotations

import pytest
import torch
from support.engines import CACHE_TOKENS, generate, greedy, ids, open_llm
from support.matrix import matrix
from support.models import ModelShop
from support.step_log import log_steps
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN, ZOO

LENGTHS = (1, 7, 15, 16, 17, 33, 129, 500)
BLOCK_SIZES = (8, 16, 32)
MODES = ("chunks of 16", "chunks of 2048", "whole prompts")
ENGINE_ARGS = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 2048": {"max_num_batched_tokens": 2048},
    "whole prompts": {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
}
# Every model with every block size and every mode, and every pair of the two with some models.


@pytest.mark.parametrize(("block_size", "mode", "name"), matrix(BLOCK_SIZES, MODES, list(ZOO)))
def test_greedy_as_transformers(models: ModelShop, name: str, block_size: int, mode: str) -> None:
    folder = models.folder(ZOO[name])
    oracle = models.oracle(folder)
    prompts = oracle.random_prompts(LENGTHS, seed=1)
    with log_steps() as log, open_llm(folder, block_size=block_size, **ENGINE_ARGS[mode]) as llm:
        assert llm.llm_engine.num_total_blocks == CACHE_TOKENS // block_size
        outputs = ids(generate(llm, prompts, greedy()))
    assert len({token for token_ids in outputs for token in token_ids}) >= 20
    oracle.assert_greedy(prompts, outputs)
    assert log.max_rows > 5
    if mode == "chunks of 16":
        assert log.num_partial_chunks >= sum(LENGTHS) // 16
        assert log.max_tokens <= 16
        assert log.num_mixed_steps > 0
    elif mode == "chunks of 2048":
        assert 300 < log.max_tokens <= 2048
    else:
        assert log.num_partial_chunks == 0
        assert log.max_tokens > 500


@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        (ZOO["d96-7to1-llama3"], LENGTHS),
        # alone and long enough that threads share one sequence's context
        (TinyLlama(64, 8, 2, max_positions=1400), (1300,)),
    ],
    ids=["many sequences", "one long sequence"],
)
def test_two_threads(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, spec: TinyLlama, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setenv("TPENGINE_NUM_THREADS", "2")
    folder = models.folder(spec)
    oracle = models.oracle(folder)
    prompts = oracle.random_prompts(lengths, seed=1)
    try:
        with open_llm(folder, max_num_batched_tokens=256) as llm:
            assert torch.get_num_threads() == 2
            outputs = generate(llm, prompts, greedy())
    finally:
        torch.set_num_threads(1)
    oracle.assert_greedy(prompts, ids(outputs))


def test_chunk_borders_everywhere(models: ModelShop) -> None:
    """One prompt, cut by budgets that put the border at every offset of a block."""
    folder = models.folder(PLAIN)
    oracle = models.oracle(folder)
    prompts = oracle.random_prompts([129], seed=1)
    for budget in range(2, 19):
        with log_steps() as log, open_llm(folder, max_num_batched_tokens=budget) as llm:
            outputs = generate(llm, prompts, greedy(8))
        oracle.assert_greedy(prompts, ids(outputs), 8)
        assert log.num_partial_chunks == -(-129 // budget) - 1
