"""The model that tests of the executor share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import ModelShop
from support.zoo import PLAIN


@pytest.fixture(scope="session")
def folder(ray_address: str, models: ModelShop) -> Path:
    """A tiny random Llama, and a cluster to run it on."""
    return models.folder(PLAIN)
