"""Counts of each sequence's tokens against `collections.Counter`."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import torch

from tpengine.layers.logit_edits import TokenCounts

MAX_NUM_SEQS = 20
CPU = torch.device("cpu")


def _read(counts: TokenCounts, slots: list[int]) -> list[dict[int, int]]:
    """Returns the entries of each slot, and checks that repetitions agree."""
    tokens = counts.gather(np.array(slots, np.int64))
    rows = []
    for ids, times in zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True):
        row: dict[int, int] = {}
        for token_id, count in zip(ids, times, strict=True):
            assert row.setdefault(token_id, count) == count
        rows.append(row)
    return rows


def _expected(prompt: list[int], output: list[int]) -> dict[int, int]:
    times = Counter(output)
    return {token_id: times[token_id] for token_id in {*prompt, *output}} or {0: 0}


def test_against_counter() -> None:
    rng = random.Random(3)
    counts = TokenCounts(MAX_NUM_SEQS, CPU)
    truth: dict[int, tuple[list[int], list[int]]] = {}
    events: Counter[str] = Counter()
    for _ in range(1500):
        event = rng.choice(["write", "append", "append", "append", "append", "fork", "clear"])
        slot = rng.randrange(MAX_NUM_SEQS)
        if event == "write":
            vocab_size = rng.choice([5, 400])  # few distinct tokens, or more than fit at first
            prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(0, 90))]
            output = [rng.randrange(vocab_size) for _ in range(rng.randrange(0, 30))]
            counts.write(slot, np.array(prompt, np.int32), np.array(output, np.int32))
            truth[slot] = (prompt, output)
        elif event == "append":
            slots = rng.sample(range(MAX_NUM_SEQS), rng.randrange(1, MAX_NUM_SEQS))
            tokens = [rng.randrange(rng.choice([5, 400])) for _ in slots]
            counts.append(
                np.array(slots, np.int64),
                np.array(tokens, np.int64),
                lambda slot: len({*truth[slot][0], *truth[slot][1]}),
            )
            for slot, token_id in zip(slots, tokens, strict=True):
                if slot in truth:
                    truth[slot][1].append(token_id)
        elif event == "fork":
            parent = rng.randrange(MAX_NUM_SEQS)
            if parent == slot:
                continue
            counts.fork(parent, slot)
            truth.pop(slot, None)
            if parent in truth:
                truth[slot] = (list(truth[parent][0]), list(truth[parent][1]))
        else:
            counts.clear(slot)
            truth.pop(slot, None)
        events[event] += 1
        assert counts.is_empty == (not truth)
        if truth:
            slots = list(truth)
            assert _read(counts, slots) == [_expected(*truth[slot]) for slot in slots]
    assert min(events.values()) > 100
    # 20 rows, and the widest sequence had at most 400 distinct tokens.
    assert counts.num_bytes <= MAX_NUM_SEQS * 12 * 2 * 400


def test_nothing_is_allocated_before_it_is_needed() -> None:
    counts = TokenCounts(256, CPU)
    counts.append(np.arange(256), np.arange(256), never)
    counts.fork(0, 1)
    counts.clear(0)
    assert counts.num_bytes == 0
    counts.write(7, np.arange(1000, dtype=np.int32), np.empty(0, np.int32))
    assert 0 < counts.num_bytes <= 8 * 12 * 1000


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
