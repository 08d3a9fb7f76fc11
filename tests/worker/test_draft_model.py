"""What the draft model's cache holds from step to step, with a model that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.attention import AttentionMetadata
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker.draft_model import DraftModel
from tpengine.worker.input_batch import InputBatch
from tpengine.worker.transfers import Uploads

VOCAB_SIZE = 64


@dataclass
class FakeModel:
    """Guesses the token + 1. Its cache holds the token of each place.

    Attributes:
        sizes: tokens of each pass.
    """

    cache: dict[int, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    kv_caches: list[Any] = field(default_factory=list)

    def forward(self, ids: torch.Tensor, _: Any, metadata: AttentionMetadata) -> torch.Tensor:
        self.cache.update(zip(metadata.slot_mapping.tolist(), ids.tolist(), strict=True))
        self.sizes.append(len(ids))
        return ids.long()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((hidden + 1) % VOCAB_SIZE, VOCAB_SIZE).float()

    def move(self, moves: Any) -> None:
        pass


class Rank:
    """A batch and its draft model.

    Attributes:
        behind: slots for which the latest step could not guess.
    """

    behind: list[int]

    def __init__(self, max_step_tokens: int) -> None:
        self.batch = InputBatch(8, 64, 4, Uploads(torch.device("cpu")))
        self.model = FakeModel()
        model = cast(Any, self.model)
        alone = ParallelState(0, 1)
        self.drafts = DraftModel(model, model, None, self.batch, alone, max_step_tokens)

    def enter(self, slot: int, *token_ids: int) -> NewSequence:
        rules, blocks = SamplingRules(temperature=0.0), [*range(16 * slot, 16 * slot + 16)]
        return NewSequence(
            slot, [*token_ids], len(token_ids), len(token_ids) - 1, blocks, rules, 0, 0, []
        )

    def step(
        self, sampled: dict[int, list[int]], num_drafts: int, **fields: Any
    ) -> list[list[int]]:
        """Computes a step with a row for each of these slots and for its drafts; returns these.

        Args:
            sampled: by slot, what is sampled in its rows; 0 where it does not matter.
        """
        slots = [slot for slot in sampled for _ in range(1 + num_drafts)]
        ids = np.array([*sampled.values()]).ravel()
        drafts = [(slot, [0] * num_drafts) for slot in sampled if num_drafts]
        ones, rows = [1] * len(slots), [*range(len(slots))]
        step = StepInput(
            1, slots, ones, sample_rows=rows, sample_slots=slots, drafts=drafts, **fields
        )
        batch, drafter = self.batch, self.drafts
        batch.apply(step)
        drafter.apply(step)
        self.behind = drafter.guess(step) if drafts else []
        ends = {slot: int(batch.num_tokens[slot]) for slot in sampled}
        guesses = [batch.token_ids[s, e : e + num_drafts].tolist() for s, e in ends.items()]
        batch.note_computed(step)
        batch.append(step, ids)
        return guesses

    def check(self) -> None:
        """What counts as computed is what the batch holds."""
        self.drafts.apply(StepInput(0, [], []))
        for slot in range(8):
            for place in range(self.drafts.num_computed_tokens[slot]):
                at = self.batch.block_table[slot, place // 4] * 4 + place % 4
                assert self.model.cache[at] == self.batch.token_ids[slot, place], (slot, place)


@pytest.mark.parametrize("num_right", range(4))
def test_rejected_drafts_leave_nothing_behind(num_right: int) -> None:
    """Also if the next steps have no drafts."""
    rank = Rank(max_step_tokens=32)
    sampled = [[11, 12, 13, 14][i] if i < num_right else 40 for i in range(4)]
    new = [rank.enter(2, 7, 8, 9, 10)]
    assert rank.step({2: sampled}, 3, new_sequences=new) == [[11, 12, 13]]
    for token_id in (50, 51, 52, 53):
        rank.step({2: [token_id]}, 0)
    rank.check()
    assert rank.step({2: [0, 0]}, 1) == [[54]]
    rank.check()


def test_long_sequences_are_read_over_several_steps() -> None:
    """A step computes a limited number of tokens, however many sequences have their first drafts;
    those that are read already have drafts meanwhile."""
    rank = Rank(max_step_tokens=16)
    lengths, known = [30, 3, 30], []
    new = [rank.enter(slot, *range(size)) for slot, size in enumerate(lengths)]
    for _ in range(6):
        rank.model.sizes.clear()
        fields = {} if known else {"new_sequences": new}
        guesses = rank.step({slot: [40, 0] for slot in range(3)}, 1, **fields)
        rank.check()
        assert sum(rank.model.sizes) <= 16 + 2 * 3
        known.append([slot not in rank.behind for slot in range(3)])
        expected = [[size] if len(known) == 1 else [41] for size in lengths]
        for slot in range(3):
            assert guesses[slot] == (expected[slot] if known[-1][slot] else [0])
    assert [sum(step) for step in known] == [1, 2, 2, 3, 3, 3], "the shortest first"
