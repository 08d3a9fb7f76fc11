"""What all tests of the executor must leave as it was."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left(nothing_is_left: None) -> None:
    """No test leaves a file in shared memory."""
