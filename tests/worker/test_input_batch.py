"""The running batch in its slots: a step's tensors, and how they change from step to step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tpengine.layers.attention import AttentionMetadata
from tpengine.layers.sampler import sample
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


def pick(batch: InputBatch, step: StepInput) -> int:
    """Returns the sampled id for logits in which 40 is likelier than 41, and 41 likelier than 7."""
    logits = torch.zeros(1, 64)
    logits[0, [40, 41, 7]] = torch.tensor([9.0, 8.0, 7.0])
    return int(sample(logits, batch.sampling_batch(step)).token_ids[0])


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


def test_the_driver_overrides_a_token(batch: InputBatch) -> None:
    prompt = StepInput(1, [0], [3], [new(0, [5, 6, 7], 0, [1])], sample_rows=[0], sample_slots=[0])
    batch.apply(prompt)
    advance(batch, prompt, np.array([50]))
    step = StepInput(2, [0], [1], token_overrides=[(0, 77)], sample_rows=[0], sample_slots=[0])
    assert begin(batch, step)[0].tolist() == [77]


def test_a_slot_keeps_nothing_of_its_previous_sequence(batch: InputBatch) -> None:
    first = NewSequence(3, list(range(9)), 9, 8, [1, 2, 5], GREEDY, 0, 0, [4])
    step = StepInput(1, [3], [1], [first], sample_rows=[0], sample_slots=[3])
    batch.apply(step)
    advance(batch, step, np.array([50]))
    again = StepInput(2, [3], [2], [new(3, [30, 31], 0, [7])], freed_slots=[3], sample_rows=[0])
    again.sample_slots = [3]
    token_ids, metadata = begin(batch, again)
    assert token_ids.tolist() == [30, 31]
    assert metadata.positions.tolist() == [0, 1]
    assert metadata.slot_mapping.tolist() == [28, 29]
    assert metadata.block_table.tolist() == [[7]]
    assert pick(batch, again) == 40


def test_the_last_column_may_be_sampled(batch: InputBatch) -> None:
    """A prompt of the longest length gets one token, which has no column."""
    sequence = NewSequence(1, list(range(20)), 20, 0, [0, 1, 2, 3, 4], GREEDY, 0, 0, [])
    step = StepInput(1, [1], [20], [sequence], sample_rows=[0], sample_slots=[1])
    begin(batch, step)
    advance(batch, step, np.array([99]))
    assert batch.num_tokens[1] == 21
    assert batch.token_ids[1].tolist() == list(range(20))


def test_bans_last_until_min_tokens(batch: InputBatch) -> None:
    params = SamplingRules(min_tokens=2, temperature=0.0)
    sequence = NewSequence(5, [1, 2, 3], 3, 0, [0], params, 9, 0, [40, 41])
    step = StepInput(1, [5], [3], [sequence], sample_rows=[0], sample_slots=[5])
    batch.apply(step)
    picked = []
    for number in range(2, 5):
        picked.append(pick(batch, step))
        advance(batch, step, np.array([60]))
        step = StepInput(number, [5], [1], sample_rows=[0], sample_slots=[5])
        batch.apply(step)
    assert picked == [7, 7, 40]


def test_parameters_follow_their_slot(batch: InputBatch) -> None:
    hot = SamplingRules(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, logprobs=4)
    sequences = [
        NewSequence(6, [1, 2, 3], 3, 0, [0], hot, 9, 0, []),
        NewSequence(1, [4, 5], 2, 0, [1], GREEDY, 9, 0, []),
    ]
    step = StepInput(1, [6, 1], [3, 2], sequences, sample_rows=[0, 1], sample_slots=[6, 1])
    batch.apply(step)
    sampling = batch.sampling_batch(step)
    assert sampling.temperature.tolist() == [0.5, 0.0]
    assert sampling.top_k.tolist() == [3, 0]
    assert sampling.top_p.tolist() == [0.75, 1.0]
    assert sampling.min_p.tolist() == [0.25, 0.0]
    assert sampling.num_logprobs.tolist() == [4, -1]
    assert sampling.positions.tolist() == [3, 2]
    assert sampling.noise_key[0] == sampling.noise_key[1]  # same seed and index


def test_blocks_before_the_window_are_not_read() -> None:
    """The next token sees five tokens before it. A decode and a chunk: the blocks that the driver
    has given to others, named or not, become the first one that the row keeps."""
    uploads = Uploads(torch.device("cpu"))
    batch = InputBatch(8, 20, 4, uploads, num_kept_tokens=5)
    rows = [new(1, list(range(14)), 13, [8, 7, 2, 9]), new(3, list(range(18)), 9, [-1, 5, 6, 3, 4])]
    step = StepInput(1, [1, 3], [1, 9], rows, sample_rows=[0, 1], sample_slots=[1, 3])
    _, metadata = begin(batch, step)
    assert metadata.block_table.tolist() == [[2, 2, 2, 9, 0], [5, 5, 6, 3, 4]]
    assert metadata.block_table.dtype == torch.int32
    assert metadata.slot_mapping.tolist() == [9 * 4 + 1, *range(25, 28), *range(12, 18)]
