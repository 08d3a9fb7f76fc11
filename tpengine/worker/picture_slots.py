"""Where the sequences of the running batch have pictures.

Example, a prompt of an old token, a picture of two rows and three columns, and two more tokens. If
tokens of pictures have a position on each of three axes, these are:

    token    a   p  p  p  p  p  p   b  c
    time     0   1  1  1  1  1  1   4  5
    row      0   1  1  1  2  2  2   4  5
    column   0   1  2  3  1  2  3   4  5
    offset behind the picture: 4 - 7 = -3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpengine.layers.device_values import Int32
from tpengine.messages import PictureSpan, StepInput


@dataclass(frozen=True, slots=True)
class PictureRow:
    """Consecutive tokens of a step that stand for a part of a picture.

    Attributes:
        first_token: index of the first one among the step's tokens.
        first_row: the row of the picture's features that it gets.
        end: see `PictureSpan`.
    """

    first_token: int
    num_tokens: int
    first_row: int
    digest: bytes
    end: int


class PictureSlots:
    """The pictures of each slot.

    Args:
        has_axes: whether tokens of pictures have a position on each of three axes.

    Attributes:
        offsets: int32 `[max_num_seqs]`, what is added to the position of a token behind the last
            picture.
    """

    def __init__(self, max_num_seqs: int, has_axes: bool) -> None:
        self._has_axes = has_axes
        self._spans: dict[int, list[PictureSpan]] = {}
        # By slot, int32 `[3, num_tokens]`, up to the end of the last picture.
        self._axes: dict[int, Int32] = {}
        self.offsets = np.zeros(max_num_seqs, np.int32)

    @property
    def has_offsets(self) -> bool:
        """Whether a slot has an offset."""
        return bool(self._has_axes and self.offsets.any())

    def enter(self, slot: int, spans: list[PictureSpan]) -> None:
        """Takes the pictures of a sequence that enters the batch; there may be none."""
        self.leave(slot)
        if spans:
            self._spans[slot] = spans
            if self._has_axes:
                self._axes[slot] = axes = _axes_of(spans)
                self.offsets[slot] = axes.max() + 1 - axes.shape[1]

    def leave(self, slot: int) -> None:
        """Forgets the pictures of a slot."""
        self._spans.pop(slot, None)
        self._axes.pop(slot, None)
        self.offsets[slot] = 0

    def rows(self, step: StepInput, starts: Int32) -> list[PictureRow]:
        """Finds the tokens of a step that stand for pictures.

        Args:
            starts: int32 `[num_rows]`, the position of each row's first token.
        """
        rows, first = list[PictureRow](), 0
        sized = zip(step.slots, step.num_scheduled_tokens, starts.tolist(), strict=True)
        for slot, size, start in sized if self._spans else ():
            for span in self._spans.get(slot, ()):
                low, high = max(start, span.start), min(start + size, span.end)
                if low < high:
                    place, row = first + low - start, span.first_row + low - span.start
                    rows.append(PictureRow(place, high - low, row, span.digest, span.end))
            first += size
        return rows

    def positions(self, step: StepInput, starts: Int32, positions: Int32) -> Int32 | None:
        """Returns the positions of a step's tokens on three axes, int32 `[3, num_tokens]`; None:
        for each token they are equal.

        Args:
            starts: see `rows`.
            positions: int32 `[num_tokens]`, as behind the last picture.
        """
        on_axes, first = None, 0
        sized = zip(step.slots, step.num_scheduled_tokens, starts.tolist(), strict=True)
        for slot, size, start in sized if self._axes else ():
            axes = self._axes.get(slot)
            if axes is not None and start < axes.shape[1]:
                if on_axes is None:
                    on_axes = np.repeat(positions[None], 3, axis=0)
                part = axes[:, start : start + size]
                on_axes[:, first : first + part.shape[1]] = part
            first += size
        return on_axes


def key_ends(positions: Int32, num_decodes: int, rows: Sequence[PictureRow]) -> Int32:
    """Returns the position behind the last key that each token in a chunk sees, where the tokens of
    a picture see each other, int32 `[num_tokens - num_decodes]`.

    Args:
        positions: int32 `[num_tokens]`, of the step.
    """
    ends = positions[num_decodes:] + 1
    for row in rows:
        first = row.first_token - num_decodes
        if first >= 0:
            ends[first : first + row.num_tokens] = row.end
    return ends


def _axes_of(spans: Sequence[PictureSpan]) -> Int32:
    """The positions of a prompt's tokens up to its last picture, int32 `[3, num_tokens]`. A token
    of text has the next number on each axis. A picture begins there: its tokens count rows and
    columns from it, and what follows begins behind the longer side."""
    axes, next_one, done = np.zeros((3, spans[-1].end), np.int32), 0, 0
    for span in spans:
        num_before = span.start - done
        axes[:, done : span.start] = next_one + np.arange(num_before)
        next_one += num_before
        rows, columns = np.divmod(np.arange(span.num_tokens), span.num_columns)
        axes[:, span.start : span.end] = next_one
        axes[1, span.start : span.end] += rows
        axes[2, span.start : span.end] += columns
        next_one, done = next_one + 1 + int(max(rows[-1], columns.max())), span.end
    return axes
