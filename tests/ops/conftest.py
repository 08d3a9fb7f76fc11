from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cases import threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are quicker so; what threads do is tested where `threads` is called."""
    with threads(1):
        yield
