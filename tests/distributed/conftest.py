"""Processes that tests share, and the promise that nothing is left in shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks
from tpengine.distributed.shared_memory import SHM_FOLDER


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Ranks]]:
    """Connected ranks by their number, each by shared memory and by gloo."""
    found = {}
    try:
        for size in (2, 4):
            found[size] = ranks = Ranks(size)
            for kind in ("shared memory", "gloo"):
                ranks.connect(kind)
        yield found
    finally:
        for ranks in found.values():
            ranks.close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    """Two ranks of the test's own, which it may kill."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def three() -> Iterator[Ranks]:
    """Three such ranks."""
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(SHM_FOLDER.glob("tpengine-*"))
    yield
    assert set(SHM_FOLDER.glob("tpengine-*")) <= before
