"""Fixtures that all test rooms share."""

from __future__ import annotations

import os

# Small models gain nothing from a second thread, and where other processes want the cores two
# threads wait for each other. Before torch is imported, as is `tpengine`, which bounds the waiting.
os.environ.setdefault("TPENGINE_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tpengine  # noqa: F401

# isort: split

from pathlib import Path

import pytest
from support.models import ModelShop
from support.oracle import Oracle
from support.ray_cluster import (  # noqa: F401  # fixtures for all rooms
    nothing_is_left,
    ray_address,
    wait_until,
)

from tpengine.config import EMBEDDED_MODEL

_RAY_ROOMS = ("cluster", "distributed", "executor", "recovery_ray")
"""They share one Ray cluster, and look at shared memory, which is the machine's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `make test`, which runs two processes of pytest: who stays together, the longest first.

    One takes everything on Ray, the other begins with the server; files follow as either is free.
    """
    here = Path(__file__).parent
    group_of = {}
    for item in items:
        place = item.path.relative_to(here)
        group = "ray" if place.parts[0] in _RAY_ROOMS else place.parts[0]
        if group not in ("ray", "server"):
            group = str(place)
        group_of[item] = group
        item.add_marker(pytest.mark.xdist_group(group))
    first = {"ray": 0, "server": 1}
    items.sort(key=lambda item: first.get(group_of[item], 2))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelShop:
    return ModelShop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def embedded_oracle(models: ModelShop) -> Oracle:
    return models.oracle(EMBEDDED_MODEL)
