"""What all of these tests must leave as it was, and the model that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import ModelShop
from support.waiting import wait_until
from support.zoo import PLAIN

from recovery.on_ray.processes import actors


@pytest.fixture(scope="module", autouse=True)
def _no_actor_is_left() -> Iterator[None]:
    """No file of tests leaves a rank, a spare or an agent, stopped or not."""
    before = actors().keys()
    yield
    wait_until(lambda: actors().keys() <= before)


@pytest.fixture(scope="module")
def folder(models: ModelShop) -> Path:
    """A tiny random Llama with a tokenizer."""
    return models.folder(PLAIN, tokenizer=True)
