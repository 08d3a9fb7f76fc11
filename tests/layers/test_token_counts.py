"""Counts of each sequence's tokens: their memory, and what a fork takes with it."""

from __future__ import annotations

import numpy as np
import torch

from tpengine.layers.logit_edits import TokenCounts

CPU = torch.device("cpu")


def test_nothing_is_allocated_before_it_is_needed() -> None:
    counts = TokenCounts(256, CPU)
    counts.append(np.arange(256), np.arange(256), never)
    counts.fork(0, 1)
    counts.clear(0)
    assert counts.num_bytes == 0
    counts.write(7, np.arange(1000, dtype=np.int32), np.empty(0, np.int32))
    assert 0 < counts.num_bytes <= 8 * 12 * 1000


def test_a_fork_alone_reads_what_its_parent_reads() -> None:
    counts = TokenCounts(4, CPU)
    counts.write(0, np.arange(40, dtype=np.int32), np.arange(9, dtype=np.int32))
    counts.fork(0, 2)
    parent, child = counts.gather(np.array([0])), counts.gather(np.array([2]))
    assert child.ids.tolist() == parent.ids.tolist() == [list(range(40))]
    assert child.counts.tolist() == parent.counts.tolist() == [[1] * 9 + [0] * 31]


def test_repeated_tokens_take_no_room_next_to_rows_of_other_ages() -> None:
    """The bounds of all rows are too high, not only that of the row that is full first."""
    counts, slots = TokenCounts(8, CPU), list(range(8))
    for slot in slots:
        counts.write(slot, np.array([slot, 9], np.int32), np.empty(0, np.int32))
    before = counts.num_bytes
    for step in range(600):
        running = np.array([slot for slot in slots if step >= 5 * slot])
        counts.append(running, np.full(len(running), 9), lambda slot: 2)
    assert counts.num_bytes == before


def test_a_row_that_is_nearly_full_is_seldom_counted() -> None:
    counts, asked = TokenCounts(4, CPU), []

    def count_distinct(slot: int) -> int:
        asked.append(slot)
        return 63

    counts.write(1, np.arange(63, dtype=np.int32), np.empty(0, np.int32))
    for number in range(200):
        counts.append(np.array([1]), np.array([number % 63]), count_distinct)
    assert 0 < len(asked) <= 4


def test_the_device_is_never_asked() -> None:
    """To ask it would wait for the next step. Tensors on torch's meta device cannot be read."""
    counts = TokenCounts(4, torch.device("meta"))
    held = list(range(40))
    counts.write(1, np.array(held, np.int32), np.empty(0, np.int32))
    for number in range(300):
        counts.append(np.array([1]), np.array([number]), lambda slot: len(set(held)))
        held.append(number)
        assert counts.gather(np.array([1])).ids.shape[1] >= len(set(held))


def never(slot: int) -> int:
    raise AssertionError("there is room")
