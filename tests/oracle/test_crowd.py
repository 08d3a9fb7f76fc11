"""A request's tokens do not depend on the other requests of its batch."""

from __future__ import annotations

import pytest
from support.engines import generate, greedy, ids, open_llm
from support.models import ModelShop
from support.step_log import log_steps
from support.zoo import PLAIN

LENGTHS = (1, 5, 12, 16, 23, 32, 47, 64, 90, 121, 160, 200, 255, 31, 40, 50) * 4


@pytest.mark.parametrize(
    ("engine_args", "min_rows"),
    [
        ({"max_num_batched_tokens": 64}, 20),
        pytest.param({"max_num_batched_tokens": 2048}, 64, marks=pytest.mark.soak),
        ({"max_num_batched_tokens": 2048, "enable_chunked_prefill": False}, 64),
    ],
    ids=["chunks of 64", "chunks of 2048", "whole prompts"],
)
def test_sixty_four_at_once(models: ModelShop, engine_args: dict[str, int], min_rows: int) -> None:
    folder, oracle, prompts = models.problem(PLAIN, LENGTHS, seed=2)
    assert len({tuple(prompt) for prompt in prompts}) == 64
    oracle.assert_discerning(prompts)
    with log_steps() as log, open_llm(folder, **engine_args) as llm:
        outputs = generate(llm, prompts, greedy())
    assert ids(outputs) == [answer.token_ids for answer in oracle.answers(prompts)]
    assert log.max_rows >= min_rows
    assert (log.num_partial_chunks > 0) == engine_args.get("enable_chunked_prefill", True)
