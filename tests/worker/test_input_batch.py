"""The running batch in its slots: a step's tensors, and how they change from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tpengine.layers.attention import AttentionMetadata
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker.input_batch import InputBatch, upload_step
from tpengine.worker.transfers import Uploads

GREEDY = SamplingRules(temperature=0.0)


@pytest.fixture
def batch() -> InputBatch:
    uploads = Uploads(torch.device("cpu"))
    return InputBatch(max_num_seqs=8, max_model_len=20, block_size=4, uploads=uploads)


def new(slot: int, token_ids: list[int], computed: int, blocks: list[int]) -> NewSequence:
    return NewSequence(slot, token_ids, 3, computed, blocks, GREEDY, 0, 0, [])


def begin(batch: InputBatch, step: StepInput) -> tuple[torch.Tensor, AttentionMetadata]:
    """Applies a step, and returns its tensors."""
    batch.apply(step)
    return upload_step(batch.step_arrays(step), batch.uploads)


def advance(batch: InputBatch, step: StepInput, sampled: npt.NDArray[np.int64]) -> None:
    batch.note_computed(step)
    batch.append(step, sampled)


def test_worked_example_of_the_docstring(batch: InputBatch) -> None:
    seven = new(7, [10, 11, 12, 13, 14, 15], 5, [9, 3])
    two = new(2, [20, 21, 22, 23, 24, 25, 26, 27], 4, [8, 1])
    step = StepInput(1, [7, 2], [1, 3], [seven, two], sample_rows=[0], sample_slots=[7])
    token_ids, metadata = begin(batch, step)
    assert token_ids.tolist() == [15, 24, 25, 26]
    assert metadata.positions.tolist() == [5, 4, 5, 6]
    assert metadata.slot_mapping.tolist() == [3 * 4 + 1, 1 * 4, 1 * 4 + 1, 1 * 4 + 2]
    assert metadata.block_table.tolist() == [[9, 3], [8, 1]]
    assert metadata.seq_lens.tolist() == [6, 7]
    assert metadata.query_start_loc.tolist() == [0, 3]
    assert metadata.num_decodes == 1
    assert batch.last_positions(step).tolist() == [0]
    chunk = StepInput(2, [7, 2], [1, 3], sample_rows=[], sample_slots=[])
    assert batch.last_positions(chunk).tolist() == [0], "one row that is not read, not all rows"
    for tensor in (
        token_ids,
        metadata.positions,
        metadata.slot_mapping,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
    ):
        assert tensor.dtype == torch.int32


def test_steps_go_on_without_the_driver(batch: InputBatch) -> None:
    """After a step the worker knows its sampled ids; the next message contains slots only."""
    prompt = StepInput(1, [4], [3], [new(4, [5, 6, 7], 0, [2])], sample_rows=[0], sample_slots=[4])
    begin(batch, prompt)
    assert batch.last_positions(prompt).tolist() == [2]
    advance(batch, prompt, np.array([50]))
    decode = StepInput(2, [4], [1], sample_rows=[0], sample_slots=[4])
    token_ids, metadata = begin(batch, decode)
    assert token_ids.tolist() == [50]
    assert metadata.positions.tolist() == [3]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 3]
    assert batch.last_positions(decode) is None
    advance(batch, decode, np.array([51]))
    grown = StepInput(3, [4], [1], new_block_ids=[(4, [6])], sample_rows=[0], sample_slots=[4])
    token_ids, metadata = begin(batch, grown)
    assert token_ids.tolist() == [51]
    assert metadata.slot_mapping.tolist() == [6 * 4]
    assert metadata.block_table.tolist() == [[2, 6]]
    assert metadata.query_start_loc.tolist() == [0]


@pytest.mark.parametrize(
    ("sampled", "appended"),
    [
        ([5, 7, 8], [5, 7, 8]),
        ([5, 9, 8], [5, 9]),
        ([6, 7, 8], [6]),  # what is sampled after a wrong draft may be the next draft by chance
    ],
)
def test_drafts_count_as_long_as_they_are_what_was_sampled(
    batch: InputBatch, sampled: list[int], appended: list[int]
) -> None:
    """In rows of their own, behind that of their sequence."""
    seven, two = new(7, [10, 11, 12, 13, 14, 15], 5, [9, 3, 2]), new(2, [20, 21, 22], 2, [8])
    slots = [7, 7, 7, 2]
    step = StepInput(1, slots, [1] * 4, [seven, two], drafts=[(7, [5, 7])])
    step.sample_rows, step.sample_slots = [0, 1, 2, 3], slots
    token_ids, metadata = begin(batch, step)
    assert token_ids.tolist() == [15, 5, 7, 22]
    assert metadata.positions.tolist() == [5, 6, 7, 2]
    assert metadata.slot_mapping.tolist() == [3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 8 * 4 + 2]
    assert metadata.seq_lens.tolist() == [6, 7, 8, 3]
    assert batch.sampling_batch(step).positions.tolist() == [6, 7, 8, 3]
    batch.note_computed(step)
    rejected = batch.append(step, np.array([*sampled, 30]))
    assert rejected == list(range(len(appended), 3))
    assert batch.num_tokens[slots[2:]].tolist() == [6 + len(appended), 4]
    assert batch.num_computed_tokens[slots[2:]].tolist() == [5 + len(appended), 3]
    assert batch.token_ids[7, 6 : 6 + len(appended)].tolist() == appended
