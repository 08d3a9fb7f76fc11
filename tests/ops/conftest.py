from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cases import threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread, which is faster for small tensors; tests of threads call `threads`."""
    with threads(1):
        yield
