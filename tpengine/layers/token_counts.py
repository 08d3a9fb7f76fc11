"""Which tokens each penalised sequence holds, kept on the device from step to step.

A row holds the *distinct* ids of one sequence and how often its output contains each. A step adds
one token per row and the penalties touch those ids only, so both cost as much as there are
different tokens, not as much as the vocabulary has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.upload import upload

_NO_ROW = -1
_NO_TOKEN = -1
_FIRST_ROWS = 8
_FIRST_WIDTH = 64
_SPARE_SHARE = 8
"""An eighth of the columns."""


@dataclass(slots=True)
class CountedTokens:
    """Distinct tokens of some sequences, each `[num_sequences, width]`.

    Shorter ones are filled up with repetitions of their first token, count included: whatever is
    computed from an entry and written to its id is written several times alike.

    Attributes:
        ids: int64.
        counts: int32, occurrences in the output; 0 for a token that only the prompt holds.
    """

    ids: torch.Tensor
    counts: torch.Tensor


class TokenCounts:
    """Rows for the sequences that need them, in tensors that double when they are full.

    Nothing is allocated before the first `write`. A row takes 12 bytes per column; there are at
    most twice as many rows as were needed and some 2.3 times as many columns: memory stays under
    56 bytes x (most sequences with penalties at once, at least 4) x (most distinct tokens of any of
    them, at least 32), 5 MiB for 64 sequences of 1,300 distinct tokens. It is not given back, but
    used again.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._row_of_slot = np.full(max_num_seqs, _NO_ROW, np.int64)
        self._free_rows: list[int] = []
        # No more entries than this are in use. The device knows exactly, but is at the next step
        # already: who asked it would wait for that.
        self._bounds = np.zeros(0, np.int64)
        self._ids = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._counts = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._num_ids = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory in use, in bytes."""
        return sum(t.nbytes for t in (self._ids, self._counts, self._num_ids))

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is counted."""
        return len(self._free_rows) == len(self._bounds)

    def write(
        self, slot: int, prompt_ids: npt.NDArray[np.int32], output_ids: npt.NDArray[np.int32]
    ) -> None:
        """Counts a sequence anew.

        Args:
            prompt_ids: tokens that are noted, but not counted.
        """
        ids = np.unique(np.concatenate([prompt_ids, output_ids]))
        counts = np.zeros(len(ids), np.int32)
        output, times = np.unique(output_ids, return_counts=True)
        counts[np.searchsorted(ids, output)] = times
        row = self._take_row(slot)
        self._reserve_width(len(ids))
        self._ids[row] = _NO_TOKEN
        self._counts[row] = 0
        self._ids[row, : len(ids)] = upload(ids.astype(np.int64), self._device)
        self._counts[row, : len(ids)] = upload(counts, self._device)
        self._num_ids[row] = len(ids)
        self._bounds[row] = len(ids)

    def append(
        self,
        slots: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
        count_distinct: Callable[[int], int],
    ) -> None:
        """Counts one more output token of each slot; slots without a row are passed over.

        Args:
            count_distinct: how many different tokens a slot held before this one, of those that
                `write` would be given; asked now and then.
        """
        rows = self._row_of_slot[slots]
        counted = rows != _NO_ROW
        if not counted.any():
            return
        rows = rows[counted]
        width = self._room_for_one_more(slots[counted], rows, count_distinct)
        self._bounds[rows] += 1
        at = upload(rows, self._device)
        tokens = upload(token_ids[counted], self._device)
        hits = self._ids[at, :width] == tokens.unsqueeze(1)
        known = hits.any(dim=1)
        columns = torch.where(known, hits.int().argmax(dim=1), self._num_ids[at])
        self._ids[at, columns] = tokens
        self._counts[at, columns] += 1
        self._num_ids[at] += ~known

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """Gives the child a copy of the parent's row; none if the parent has none."""
        if self._row_of_slot[parent_slot] == _NO_ROW:
            self.clear(child_slot)
            return
        row = self._take_row(child_slot)
        parent = int(self._row_of_slot[parent_slot])
        for tensor in (self._ids, self._counts, self._num_ids):
            tensor[row] = tensor[parent]
        self._bounds[row] = self._bounds[parent]

    def clear(self, slot: int) -> None:
        """Gives the slot's row back, if it has one."""
        row = int(self._row_of_slot[slot])
        if row != _NO_ROW:
            self._row_of_slot[slot] = _NO_ROW
            self._bounds[row] = 0
            self._free_rows.append(row)

    def gather(self, slots: npt.NDArray[np.int64]) -> CountedTokens:
        """The tokens of slots that have a row."""
        rows = self._row_of_slot[slots]
        width = max(1, int(self._bounds[rows].max()))
        at = upload(rows, self._device)
        ids, counts = self._ids[at, :width], self._counts[at, :width]
        unused = ids == _NO_TOKEN
        # An empty row becomes id 0 with count 0, to which no penalty on output applies.
        ids = torch.where(unused, ids[:, :1], ids).clamp_(min=0)
        return CountedTokens(ids, torch.where(unused, counts[:, :1], counts))

    def _take_row(self, slot: int) -> int:
        row = int(self._row_of_slot[slot])
        if row != _NO_ROW:
            return row
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self._row_of_slot[slot] = row
        return row

    def _add_rows(self) -> None:
        num_rows, width = self._ids.shape
        more = min(max(_FIRST_ROWS, num_rows), len(self._row_of_slot) - num_rows)
        self._resize(num_rows + more, max(width, _FIRST_WIDTH))
        self._bounds = np.concatenate([self._bounds, np.zeros(more, np.int64)])
        self._free_rows = list(range(num_rows + more - 1, num_rows - 1, -1))

    def _room_for_one_more(
        self,
        slots: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        count_distinct: Callable[[int], int],
    ) -> int:
        """Makes sure that each row has a free column; returns a width that covers all of them."""
        width = self._ids.shape[1]
        if (self._bounds[rows] >= width).any():
            # Repeated tokens took no column: only now is it worth counting. All rows, as the bounds
            # of those that are not full are too high as well, and the width is for the highest.
            self._bounds[rows] = [count_distinct(slot) for slot in slots.tolist()]
            # With some to spare, or a row that is nearly full would be counted in each step.
            self._reserve_width(int(self._bounds[rows].max()) + 1 + width // _SPARE_SHARE)
        return int(self._bounds[rows].max()) + 1

    def _reserve_width(self, width: int) -> None:
        num_rows, old = self._ids.shape
        if width > old:
            self._resize(num_rows, max(width, 2 * old))

    def _resize(self, num_rows: int, width: int) -> None:
        old_rows, old_width = self._ids.shape
        for name, fill in (("_ids", _NO_TOKEN), ("_counts", 0)):
            old: torch.Tensor = getattr(self, name)
            new = torch.full((num_rows, width), fill, dtype=old.dtype, device=self._device)
            new[:old_rows, :old_width] = old
            setattr(self, name, new)
        num_ids = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        num_ids[:old_rows] = self._num_ids
        self._num_ids = num_ids
