"""Tensors that all ranks must share have the same bits at every rank."""

from __future__ import annotations

from collections import Counter

import pytest

from distributed.bits_tasks import Noted, run_noting
from distributed.ranks import Ranks
from distributed.worker_tasks import NUM_STEPS
from tpengine.config import EngineConfig

SUMS_OF_A_STEP = 1 + 2 * 2
"""Sums of a step: one of the embedding, and two of each layer (attention and MLP)."""


def check(notes: list[Noted]) -> None:
    """After every sum and broadcast all ranks have the same bits, which no rank had before, and the
    logits at rank 0 are those that the ranks computed."""
    first = notes[0]
    counts = Counter(operation for operation, _ in first.held)
    assert counts["all_reduce"] == SUMS_OF_A_STEP * NUM_STEPS
    assert counts["broadcast"] == NUM_STEPS, "of what was sampled"
    for other in notes[1:]:
        assert other.held == first.held
        assert other.gathered == []
    for operation in ("all_reduce", "gather"):
        given = [[bits for name, bits in note.given if name == operation] for note in notes]
        assert all(len(set(parts)) > 1 for parts in zip(*given, strict=True)), (
            "equal from the start"
        )
        if operation == "gather":
            assert first.gathered == [list(parts) for parts in zip(*given, strict=True)]
            assert len(first.gathered) > NUM_STEPS, "every step's logits, and the prompt's"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_hold_the_same_bits(
    num_ranks: int, config: EngineConfig, groups: dict[int, Ranks]
) -> None:
    notes = {
        kind: groups[num_ranks].run(run_noting, config, kind) for kind in ("shared memory", "gloo")
    }
    for of_ranks in notes.values():
        check(of_ranks)
    for rank in range(num_ranks):
        assert notes["gloo"][rank] == notes["shared memory"][rank], "depends on what connects them"
