"""What the draft model's cache holds from step to step, with a model that computes nothing."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.attention import AttentionMetadata
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker.draft_model import DraftModel
from tpengine.worker.input_batch import InputBatch
from tpengine.worker.transfers import Uploads


class Rank:
    """A batch and its draft model, which guesses the token + 1.

    Args:
        lengths: of the sequences in slots 0, 1, ...; each counts from 0.

    Attributes:
        cache: the token of each place of the model's cache.
        num_computed: tokens that the model has computed, counted from where a test says.
    """

    def __init__(self, max_step_tokens: int, *lengths: int) -> None:
        self.batch = InputBatch(8, 64, 4, Uploads(torch.device("cpu")))
        self.cache, self.num_computed = dict[int, int](), 0
        model = Mock(forward=self._forward, compute_logits=lambda ids: torch.eye(64)[ids + 1])
        parts = model, Mock(), None, self.batch, ParallelState(0, 1)
        self.drafts = DraftModel(*parts, max_step_tokens)
        for slot, size in enumerate(lengths):
            rest = [*range(16 * slot, 16 * slot + 16)], SamplingRules(temperature=0.0), 0, 0, []
            self._apply(StepInput(1, [], [], [NewSequence(slot, [*range(size)], size, 0, *rest)]))

    def _forward(self, ids: torch.Tensor, _: Any, metadata: AttentionMetadata) -> torch.Tensor:
        self.cache.update(zip(metadata.slot_mapping.tolist(), ids.tolist(), strict=True))
        self.num_computed += len(ids)
        return ids.long()

    def _apply(self, step: StepInput) -> None:
        self.batch.apply(step)
        self.drafts.apply(step)

    def step(self, *sampled: list[int]) -> list[list[int]]:
        """Computes a row of each slot, and rows of its drafts; returns these, none of a slot for
        which the model could not guess. What counts as computed is what the batch holds.

        Args:
            sampled: of each slot, what is sampled in its rows.
        """
        batch, own, num_drafts = self.batch, range(len(sampled)), len(sampled[0]) - 1
        slots = np.repeat(own, 1 + num_drafts).tolist()
        step = StepInput(1, slots, [1] * len(slots), sample_slots=slots)
        step.drafts = [(slot, [0] * num_drafts) for slot in own if num_drafts]
        self._apply(step)
        behind = self.drafts.guess(step) if num_drafts else []
        ends = batch.num_tokens.tolist()
        guesses = [batch.token_ids[s, ends[s] : ends[s] + num_drafts].tolist() for s in own]
        batch.note_computed(step)
        batch.append(step, np.array(sampled).ravel())
        self._apply(StepInput(1, [], []))
        for slot in own:
            for place in range(self.drafts.num_computed_tokens[slot]):
                at = batch.block_table[slot, place // 4] * 4 + place % 4
                assert self.cache[at] == batch.token_ids[slot, place], (slot, place)
        return [[] if slot in behind else guesses[slot] for slot in own]


@pytest.mark.parametrize("sampled", [[40, 0, 0, 0], [4, 40, 0, 0], [4, 5, 6, 7]])
def test_rejected_drafts_leave_nothing_behind(sampled: list[int]) -> None:
    """Also if the next steps have no drafts."""
    rank = Rank(32, 4)
    assert rank.step(sampled) == [[4, 5, 6]]
    for token_id in (50, 51, 52, 53):
        rank.step([token_id])
    assert rank.step([0, 0]) == [[54]]


def test_long_sequences_are_read_over_several_steps() -> None:
    """A step computes a limited number of tokens, however many sequences have their first drafts;
    those that are read have drafts meanwhile, the shortest first."""
    rank, ready = Rank(16, 30, 3, 30), []
    for number in range(5):
        rank.num_computed = 0
        guesses = rank.step(*[[40, 0]] * 3)
        assert rank.num_computed <= 16 + 2 * 3
        assert number or guesses == [[], [3], []]
        assert number < 4 or guesses == [[41]] * 3
        ready.append(sum(map(bool, guesses)))
    assert ready == [1, 2, 2, 3, 3]
