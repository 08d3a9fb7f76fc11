"""Which sampled ids a pipeline stage must have before it begins a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import ModelShop
from support.zoo import PLAIN

from tpengine import EngineArgs
from tpengine.distributed.parallel_state import Stage
from tpengine.messages import Fork, NewSequence, SamplingRules, StepInput
from tpengine.worker.stage_ends import StageEnds


def step(slots: list[int], sampled: list[int] | None = None, **fields: Any) -> StepInput:
    """One row of one token for each slot."""
    own = slots if sampled is None else sampled
    rows = [slots.index(slot) for slot in own if slot in slots]
    return StepInput(1, slots, [1] * len(slots), sample_rows=rows, sample_slots=own, **fields)


def entering(slot: int) -> NewSequence:
    return NewSequence(slot, [1, 2], 2, 0, [0], SamplingRules(), 0, 0, [])


PENDING = [step([0, 1]), step([2]), step([0])]
DRAFTED = replace(PENDING[1], drafts=[(2, [5])])


@pytest.mark.parametrize(
    ("pending", "begun", "count"),
    [
        (PENDING, step([3], []), 0),  # a part of a prompt
        (PENDING, step([1]), 1),
        (PENDING, step([2, 3]), 2),
        (PENDING, step([3, 0]), 3),
        (PENDING, step([1], new_sequences=[entering(1)], freed_slots=[1]), 0),
        (PENDING, step([3], forks=[Fork(2, 3, 1)]), 2),
        (PENDING, step([3], token_overrides=[(1, 9)]), 1),
        ([PENDING[0], DRAFTED], step([3], []), 2),  # which drafts count must be known
        ([*PENDING, step([5]), step([6])], step([7], []), 2),  # the oldest ones are there
    ],
)
def test_which_steps_must_be_complete(
    pending: list[StepInput], begun: StepInput, count: int, models: ModelShop
) -> None:
    config = EngineArgs(str(models.folder(PLAIN))).create_engine_config("cpu")
    ends = StageEnds(Stage(0, 3), config, torch.float32, torch.device("cpu"))
    assert ends.entering is None
    assert ends.num_needed(pending, begun) == count
