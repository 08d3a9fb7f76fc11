"""The running batch, kept in fixed slots between steps, and each step's tensors made from it.

The driver sends only what changed (`StepInput`); ids, computed counts, block tables and sampling
parameters of the others stand here already, in arrays indexed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.attention import AttentionMetadata
from tpengine.layers.sampler import SamplingBatch, noise_keys
from tpengine.messages import Fork, NewSequence, StepInput
from tpengine.worker.sampling_state import SamplingSlots
from tpengine.worker.transfers import Uploads

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class StepArrays:
    """A step's tokens and the fields of its `AttentionMetadata`, on the host."""

    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    block_table: Int32
    seq_lens: Int32
    query_start_loc: Int32
    num_decodes: int
    num_scheduled_tokens: Int32


class InputBatch:
    """Slots of the sequences that run on this rank.

    Attributes:
        token_ids: int32 `[max_num_seqs, max_model_len]`, prompt and output.
        num_tokens, num_computed_tokens: int32 `[max_num_seqs]`.
        block_table: int32 `[max_num_seqs, max_blocks]`.
        sampling: parameters of each slot's sampling.
        uploads: how arrays get to the device.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, uploads: Uploads
    ) -> None:
        self.block_size = block_size
        self.uploads = uploads
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._seeds = [0] * max_num_seqs
        self.sampling = SamplingSlots(max_num_seqs, uploads.device)

    def apply(self, step: StepInput) -> None:
        """Brings the slots up to date with the driver, in the order that `StepInput` documents."""
        for slot in step.freed_slots:
            self.sampling.clear(slot)
        for sequence in step.new_sequences:
            self._enter(sequence)
        for fork in step.forks:
            self._fork(fork)
        for slot, block_ids in step.new_block_ids:
            self._append_blocks(slot, block_ids)
        for slot, place, block_id in step.replaced_block_ids:
            self.block_table[slot, place] = block_id
        for slot, token_id in step.token_overrides:
            num_tokens = self.num_tokens[slot]
            self.token_ids[slot, num_tokens - 1] = token_id
            self.sampling.rewrite(slot, self.token_ids[slot, :num_tokens])

    def build(self, step: StepInput) -> tuple[torch.Tensor, AttentionMetadata]:
        """Makes the tensors of one step.

        Example, block_size 4: slot 7 has computed 5 tokens and adds one, slot 2 has computed 4 and
        adds three.

            slots                 7   2
            num_scheduled_tokens  1   3
            positions             5 | 4  5  6
            block_table[slot]     [9, 3] | [8, 1]
            slot_mapping          3*4+1 | 1*4+0  1*4+1  1*4+2
            seq_lens              6   7
            query_start_loc           0  3          (of the chunks only)

        Returns:
            token ids int32 `[num_tokens]` and the attention metadata.
        """
        return upload_step(self.arrays(step.slots, step.num_scheduled_tokens), self.uploads)

    def arrays(self, row_slots: Sequence[int], num_scheduled_tokens: Sequence[int]) -> StepArrays:
        """What `build` sends to the device, for these rows.

        Ids of tokens that have not been appended yet are anything.
        """
        slots = np.array(row_slots, np.int64)
        scheduled = np.array(num_scheduled_tokens, np.int32)
        computed = self.num_computed_tokens[slots]
        seq_lens = computed + scheduled
        num_decodes = int(np.count_nonzero(scheduled == 1))
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        if num_decodes == len(slots):
            token_slots, positions = slots, computed
            chunk_start_loc = np.zeros(1, np.int32)
        else:
            ends = np.cumsum(scheduled, dtype=np.int32)
            row_of_token = np.repeat(np.arange(len(slots)), scheduled)
            token_slots = slots[row_of_token]
            within_row = np.arange(ends[-1], dtype=np.int32) - (ends - scheduled)[row_of_token]
            positions = computed[row_of_token] + within_row
            chunk_start_loc = np.zeros(len(slots) - num_decodes + 1, np.int32)
            np.cumsum(scheduled[num_decodes:], out=chunk_start_loc[1:])
        token_ids = self.token_ids[token_slots, positions]
        block_ids = self.block_table[token_slots, positions // self.block_size]
        slot_mapping = block_ids * self.block_size + positions % self.block_size
        return StepArrays(
            token_ids,
            positions,
            slot_mapping,
            self.block_table[slots, :max_blocks],
            seq_lens,
            chunk_start_loc,
            num_decodes,
            scheduled,
        )

    def last_positions(self, step: StepInput) -> torch.Tensor | None:
        """Index of each sampled row's last token among the step's tokens, int64; None: every token
        is one. Where no row is sampled it is one token, whose hidden state nobody reads: to run
        layers over no row at all would be a case of its own for every op and collective."""
        num_rows = len(step.slots)
        if not step.sample_rows:
            return self.uploads.send([np.zeros(1, np.int64)])[0]
        if step.sample_rows == list(range(num_rows)) and max(step.num_scheduled_tokens) == 1:
            return None
        ends = np.cumsum(np.array(step.num_scheduled_tokens, np.int64))
        return self.uploads.send([ends[step.sample_rows] - 1])[0]

    def sampling_batch(self, step: StepInput) -> SamplingBatch:
        """Sampling parameters of the step's `sample_slots`, whose slots hold all their tokens."""
        slots = np.array(step.sample_slots, np.int64)
        return self.sampling.gather(slots, self.num_tokens[slots], self.token_ids)

    def advance(self, step: StepInput, sampled: npt.NDArray[np.int64]) -> None:
        """Notes the step's tokens as computed and appends the sampled ones, so that the next step
        can be fed without the driver."""
        self.note_computed(step)
        self.append(step, sampled)

    def note_computed(self, step: StepInput) -> None:
        """The half of `advance` that needs no ids, for while they are on their way."""
        self.num_computed_tokens[step.slots] += np.array(step.num_scheduled_tokens, np.int32)
        if step.forks:  # a slot that was sampled from its parent's row has computed what that has
            parents = np.array(step.slots, np.int64)[step.sample_rows]
            self.num_computed_tokens[step.sample_slots] = self.num_computed_tokens[parents]

    def append(self, step: StepInput, sampled: npt.NDArray[np.int64]) -> None:
        """The other half."""
        slots = np.array(step.sample_slots, np.int64)
        ends = self.num_tokens[slots]
        # A sequence that just reached the longest length has no column for its last token, which
        # is never fed anyway: the driver ends it.
        fits = ends < self.token_ids.shape[1]
        self.token_ids[slots[fits], ends[fits]] = sampled[fits]
        self.sampling.append(slots, sampled, self.token_ids, self.num_tokens)
        self.num_tokens[slots] = ends + 1

    def _enter(self, sequence: NewSequence) -> None:
        slot, count = sequence.slot, len(sequence.token_ids)
        self.token_ids[slot, :count] = sequence.token_ids
        self.num_tokens[slot] = count
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(slot, sequence.block_ids)
        self._seeds[slot] = sequence.seed
        self.sampling.write(slot, sequence, noise_keys(sequence.seed, sequence.index))

    def _fork(self, fork: Fork) -> None:
        parent, child = fork.parent_slot, fork.child_slot
        num_tokens, num_blocks = self.num_tokens[parent], self._num_blocks[parent]
        self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
        self.num_tokens[child] = num_tokens
        self.num_computed_tokens[child] = self.num_computed_tokens[parent]
        self.block_table[child, :num_blocks] = self.block_table[parent, :num_blocks]
        self._num_blocks[child] = num_blocks
        seed = self._seeds[child] = self._seeds[parent]
        self.sampling.fork(parent, child, noise_keys(seed, fork.index))

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        first = self._num_blocks[slot]
        last = first + len(block_ids)
        self.block_table[slot, first:last] = block_ids
        self._num_blocks[slot] = last


def upload_step(arrays: StepArrays, uploads: Uploads) -> tuple[torch.Tensor, AttentionMetadata]:
    """Token ids and metadata of a step; what a GPU wants beside them is not there yet."""
    token_ids, positions, slot_mapping, block_table, seq_lens, starts = uploads.send(
        [
            arrays.token_ids,
            arrays.positions,
            arrays.slot_mapping,
            arrays.block_table,
            arrays.seq_lens,
            arrays.query_start_loc,
        ]
    )
    return token_ids, AttentionMetadata(
        positions, slot_mapping, block_table, seq_lens, starts, arrays.num_decodes
    )
