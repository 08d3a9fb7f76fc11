"""One engine that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engines import make_engine, run
from support.models import ModelShop
from support.oracle import Oracle
from support.zoo import PLAIN

from tpengine import LLMEngine


@pytest.fixture(scope="module")
def shared(models: ModelShop) -> Iterator[LLMEngine]:
    with make_engine(models.folder(PLAIN, tokenizer=True)) as engine:
        yield engine


@pytest.fixture
def engine(shared: LLMEngine) -> Iterator[LLMEngine]:
    yield shared
    run(shared)
    assert shared.get_num_unfinished_requests() == 0
    assert shared.num_free_blocks == shared.num_total_blocks


@pytest.fixture(scope="module")
def oracle(models: ModelShop) -> Oracle:
    return models.oracle(models.folder(PLAIN, tokenizer=True))


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> list[int]:
    """Its greedy continuation has at least 12 distinct ids among the first 16."""
    for candidate in oracle.prompts([33] * 12, seed=11):
        first = oracle.answers([candidate])[0].token_ids[:16]
        if len(set(first)) >= 12 and not set(first) & {0, 1, 2, 3}:
            return candidate
    raise AssertionError("no such prompt")


@pytest.fixture(scope="module")
def expected(oracle: Oracle, prompt: list[int]) -> tuple[int, ...]:
    return oracle.answers([prompt])[0].token_ids
