"""Fixtures that all test rooms share."""

from __future__ import annotations

import os

# Small models gain nothing from a second thread, and where other processes want the cores two
# threads wait for each other. Before torch is imported, as is `tpengine`, which bounds the waiting.
os.environ.setdefault("TPENGINE_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tpengine  # noqa: F401

# isort: split

from typing import Any

import pytest
from support.models import ModelShop
from support.oracle import Oracle
from support.ray_cluster import (  # noqa: F401  # fixtures for all rooms
    nothing_is_left,
    ray_address,
    wait_until,
)
from support.small_llamas import folders, make_engine, oracles  # noqa: F401  # fixtures
from support.subjects import Subjects

from tpengine.config import EMBEDDED_MODEL

_LONG_ROOMS = ("executor", "server", "client", "recovery/on_ray", "distributed")
"""Their files stay together, as they share a Ray cluster, servers or ranks; they come first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `make test`, which runs two processes of pytest: the longest first."""
    first = {room: place for place, room in enumerate(_LONG_ROOMS)}
    items.sort(key=lambda item: first.get(_group_of(item.nodeid), len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who stays together: the long rooms, and otherwise files.

    xdist's own `xdist_group` writes into an attribute that items of pytest 9 do not have: every
    test is its own group then, and all that they share is made in each process.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that broke off says nothing of the tests that had not come: CI runs none again."""
    ran_all = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
    if not ran_all and cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("cache/lastfailed", {})


def _group_of(nodeid: str) -> str:
    """The long room or the file of a test, as `tests/server/test_client.py::test_commands`."""
    file = nodeid.partition("::")[0]
    inside = file.removeprefix("tests/")
    return next((room for room in _LONG_ROOMS if inside.startswith(f"{room}/")), file)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelShop:
    return ModelShop(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    """Every variant of `support.variants`, each made when it is first asked for."""
    return Subjects(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def embedded_oracle(models: ModelShop) -> Oracle:
    return models.oracle(EMBEDDED_MODEL)
