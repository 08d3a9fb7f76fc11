"""The model that tpengine carries: greedy ids equal to transformers, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import generate, greedy, ids, open_llm, preemptions
from support.matrix import matrix
from support.oracle import Oracle

from tpengine.config import EMBEDDED_MODEL

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
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    long = [token for tokens in prompts for token in tokens] * 3
    return [*prompts, long[:61]]


@pytest.mark.parametrize(("dtype", "switch"), matrix(["float32", "bfloat16"], list(SWITCHES)))
def test_greedy_as_transformers(
    embedded_oracle: Oracle, prompts: list[list[int]], dtype: str, switch: str
) -> None:
    answers = embedded_oracle.answers(prompts)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
    floor = BF16_MARGIN if dtype == "bfloat16" else 1e-3
    clear = [answer for answer in answers if answer.margin >= floor]
    assert len(clear) >= 4, [answer.margin for answer in answers]
    with open_llm(EMBEDDED_MODEL, dtype=dtype, **SWITCHES[switch]) as llm:
        outputs = generate(llm, [answer.prompt for answer in clear], greedy())
    assert ids(outputs) == [answer.token_ids for answer in clear]
    assert (preemptions(outputs) > 0) == (switch == "preempted")
