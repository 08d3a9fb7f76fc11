"""A cache so small that requests are preempted many times changes nothing but the time."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import generate, greedy, ids, open_llm, preemptions
from support.matrix import matrix
from support.models import ModelShop
from support.step_log import log_steps
from support.zoo import PLAIN, ZOO

LENGTHS = (3, 70, 17, 100, 40, 33, 120, 9, 64, 25, 90, 50, 16, 31, 80, 110)
MAX_MODEL_LEN = 192
CACHE_TOKENS = 3 * MAX_MODEL_LEN
MODES = ("recompute", "swap")

TIGHT: dict[str, dict[str, Any]] = {
    "blocks of 8, chunks of 16": {"block_size": 8, "max_num_batched_tokens": 16},
    "blocks of 8, chunks of 128": {"block_size": 8, "max_num_batched_tokens": 128},
    "blocks of 16, chunks of 2048": {"block_size": 16, "max_num_batched_tokens": 2048},
    "blocks of 16, whole prompts": {
        "block_size": 16,
        "max_num_batched_tokens": 192,
        "enable_chunked_prefill": False,
    },
    "blocks of 32, chunks of 64": {"block_size": 32, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize(("case", "mode"), matrix(list(TIGHT), MODES))
def test_preempted_greedy_equals_transformers(models: ModelShop, case: str, mode: str) -> None:
    args = TIGHT[case] | {"preemption_mode": mode}
    folder = models.folder(PLAIN)
    oracle = models.oracle(folder)
    prompts = oracle.random_prompts(LENGTHS, seed=3)
    num_blocks = CACHE_TOKENS // args["block_size"]
    with (
        log_steps() as log,
        open_llm(
            folder, max_model_len=MAX_MODEL_LEN, num_device_blocks_override=num_blocks, **args
        ) as llm,
    ):
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    assert preemptions(outputs) == log.num_preemptions
    log.assert_only(mode, at_least=5)
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == 64 * len(prompts)


@pytest.mark.parametrize("mode", MODES)
def test_one_sequence_fills_the_cache(models: ModelShop, mode: str) -> None:
    """Two requests, each of which grows until it needs every block."""
    folder = models.folder(ZOO["d80-1to1-linear-old"])
    oracle = models.oracle(folder)
    prompts = oracle.random_prompts([64, 65], seed=3)
    args = {"max_model_len": 129, "num_device_blocks_override": 17, "block_size": 8}
    with log_steps() as log, open_llm(folder, preemption_mode=mode, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    log.assert_only(mode)
