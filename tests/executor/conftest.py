"""What all tests of the executor must leave as it was, and the model that they share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import ModelShop
from support.zoo import PLAIN


@pytest.fixture(autouse=True)
def _nothing_is_left(nothing_is_left: None) -> None:
    """No test leaves a file in shared memory."""


@pytest.fixture(scope="session")
def folder(ray_address: str, models: ModelShop) -> Path:
    """A tiny random Llama, and a cluster to run it on."""
    return models.folder(PLAIN)
