"""Fixtures that all test rooms share."""

from __future__ import annotations

import os

# Small models gain nothing from a second thread, and where other processes want the cores two
# threads wait for each other. Before torch is imported, as is `tpengine`, which bounds the waiting.
os.environ.setdefault("TPENGINE_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tpengine  # noqa: F401

# isort: split

import pytest
from support.models import ModelShop
from support.oracle import Oracle
from support.ray_cluster import (  # noqa: F401  # fixtures for all rooms
    nothing_is_left,
    ray_address,
    wait_until,
)

from tpengine.config import EMBEDDED_MODEL


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelShop:
    return ModelShop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def embedded_oracle(models: ModelShop) -> Oracle:
    return models.oracle(EMBEDDED_MODEL)
