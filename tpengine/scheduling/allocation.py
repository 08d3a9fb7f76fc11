"""The block manager's answers."""

from __future__ import annotations

import enum
from typing import NamedTuple

BlockPair = tuple[int, int]
"""(source, target)"""


class AllocStatus(enum.Enum):
    """Whether blocks can be had for a request that holds none on the device."""

    OK = "ok"
    LATER = "later"
    """Not now, but once others have given blocks back."""
    NEVER = "never"
    """It needs more blocks than the whole pool has."""


class Growth(NamedTuple):
    """What a sequence's table gained.

    Attributes:
        block_ids: blocks at its end.
        copy: its block that others share and that it is about to write, and its own copy of it.
        copy_place: where in the table the copy stands.
    """

    block_ids: list[int]
    copy: BlockPair | None = None
    copy_place: int = 0
