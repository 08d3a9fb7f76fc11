"""Rows of drafts in a step: each follows the row before it of the same slot, see `StepInput`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tpengine.layers.device_values import Int32, Int64


def num_drafts_before(slots: Int64) -> Int32:
    """Counts the drafts up to each row, its own one included: how often its slot has followed
    itself. `[num_rows]`.

    Example: the slots 7 7 7 2 give 0 1 2 0.
    """
    rows = np.arange(len(slots), dtype=np.int32)
    is_own = np.ones(len(slots), np.bool_)
    is_own[1:] = slots[1:] != slots[:-1]
    return rows - np.maximum.accumulate(np.where(is_own, rows, 0))


def find_counting(drafts: Int32, guesses: Int32, sampled: Int64) -> npt.NDArray[np.bool_]:
    """Returns which samples count: those before which all drafts of their slot came true.

    Args:
        drafts: int32 `[num_rows]`, see `num_drafts_before`.
        guesses: int32 `[num_rows]`, the draft of each row that has one.
        sampled: int64 `[num_rows]`, ids.
    """
    counts: npt.NDArray[np.bool_] = drafts == 0
    for row in np.flatnonzero(drafts):
        counts[row] = counts[row - 1] and sampled[row - 1] == guesses[row]
    return counts
