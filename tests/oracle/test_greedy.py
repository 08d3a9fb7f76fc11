"""Greedy ids equal to transformers in float32: models, prompt lengths, blocks, chunks; and a cache
so small that requests are preempted many times changes nothing but the time. Also of the
model that tpengine carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import CACHE_TOKENS, generate, greedy, ids, open_llm, preemptions
from support.matrix import matrix
from support.models import ModelShop
from support.oracle import Oracle
from support.step_log import log_steps
from support.tiny_llama import TinyLlama
from support.zoo import PLAIN, ZOO

from tpengine.config import EMBEDDED_MODEL

LENGTHS = (1, 7, 15, 16, 17, 33, 129, 500)
BLOCK_SIZES = (8, 16, 32)
MODES = ("chunks of 16", "chunks of 2048", "whole prompts")
WHOLE = {"enable_chunked_prefill": False}
ENGINE_ARGS = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 2048": {"max_num_batched_tokens": 2048},
    "whole prompts": {"max_num_batched_tokens": 2048, "max_model_len": 600, **WHOLE},
}
# Every model with every block size and every mode, and every pair of the two with some models.


@pytest.mark.parametrize(("block_size", "mode", "name"), matrix(BLOCK_SIZES, MODES, list(ZOO)))
def test_greedy_as_transformers(models: ModelShop, name: str, block_size: int, mode: str) -> None:
    folder, oracle, prompts = models.problem(ZOO[name], LENGTHS, seed=1)
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
    folder, oracle, prompts = models.problem(spec, lengths, seed=1)
    try:
        with open_llm(folder, max_num_batched_tokens=256) as llm:
            assert torch.get_num_threads() == 2
            outputs = generate(llm, prompts, greedy())
    finally:
        torch.set_num_threads(1)
    oracle.assert_greedy(prompts, ids(outputs))


def test_chunk_borders_everywhere(models: ModelShop) -> None:
    """One prompt, cut by budgets that put the border at every offset of a block."""
    folder, oracle, prompts = models.problem(PLAIN, [129], seed=1)
    for budget in range(2, 19):
        with log_steps() as log, open_llm(folder, max_num_batched_tokens=budget) as llm:
            outputs = generate(llm, prompts, greedy(8))
        oracle.assert_greedy(prompts, ids(outputs), 8)
        assert log.num_partial_chunks == -(-129 // budget) - 1


CROWD = (3, 70, 17, 100, 40, 33, 120, 9, 64, 25, 90, 50, 16, 31, 80, 110)
MAX_MODEL_LEN = 192
PREEMPTION_MODES = ("recompute", "swap")
TIGHT: dict[str, dict[str, Any]] = {
    "blocks of 8, chunks of 16": {"block_size": 8, "max_num_batched_tokens": 16},
    "blocks of 8, chunks of 128": {"block_size": 8, "max_num_batched_tokens": 128},
    "blocks of 16, chunks of 2048": {"block_size": 16, "max_num_batched_tokens": 2048},
    "blocks of 16, whole prompts": {"block_size": 16, "max_num_batched_tokens": 192} | WHOLE,
    "blocks of 32, chunks of 64": {"block_size": 32, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize(("case", "mode"), matrix(list(TIGHT), PREEMPTION_MODES))
def test_preempted_greedy_equals_transformers(models: ModelShop, case: str, mode: str) -> None:
    args = TIGHT[case] | {"preemption_mode": mode, "max_model_len": MAX_MODEL_LEN}
    args["num_device_blocks_override"] = 3 * MAX_MODEL_LEN // args["block_size"]
    folder, oracle, prompts = models.problem(PLAIN, CROWD, seed=3)
    with log_steps() as log, open_llm(folder, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    assert preemptions(outputs) == log.num_preemptions
    log.assert_only(mode, at_least=5)


@pytest.mark.parametrize("mode", PREEMPTION_MODES)
def test_one_sequence_fills_the_cache(models: ModelShop, mode: str) -> None:
    """Two requests, each of which grows until it needs every block."""
    folder, oracle, prompts = models.problem(ZOO["d80-1to1-linear-old"], [64, 65], seed=3)
    args = {"max_model_len": 129, "num_device_blocks_override": 17, "block_size": 8}
    with log_steps() as log, open_llm(folder, preemption_mode=mode, **args) as llm:
        outputs = generate(llm, prompts, greedy())
    oracle.assert_greedy(prompts, ids(outputs))
    log.assert_only(mode)


BF16_MARGIN = 0.2
"""Lead that bfloat16's rounding, 3 significant digits of logits up to 20, does not take away."""

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
    "One, two, three",
    "My cat is called Pim, and we like to eat honey bread.",
    "Nobody can carry the sea home in",
)
SWITCHES: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16, "block_size": 8},
    "whole prompts": {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False},
    "preempted": {"max_model_len": 128, "block_size": 8, "num_device_blocks_override": 16},
}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    long = [token for tokens in prompts for token in tokens] * 3
    return [*prompts, long[:61]]


@pytest.mark.parametrize(("dtype", "switch"), matrix(["float32", "bfloat16"], list(SWITCHES)))
def test_the_embedded_model(
    embedded_oracle: Oracle, texts: list[list[int]], dtype: str, switch: str
) -> None:
    """Also in bfloat16."""
    answers = embedded_oracle.answers(texts)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
    floor = BF16_MARGIN if dtype == "bfloat16" else 1e-3
    clear = [answer for answer in answers if answer.margin >= floor]
    assert len(clear) >= 4, [answer.margin for answer in answers]
    with open_llm(EMBEDDED_MODEL, dtype=dtype, **SWITCHES[switch]) as llm:
        outputs = generate(llm, [answer.prompt for answer in clear], greedy())
    assert ids(outputs) == [answer.token_ids for answer in clear]
    assert (preemptions(outputs) > 0) == (switch == "preempted")
