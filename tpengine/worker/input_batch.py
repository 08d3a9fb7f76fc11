"""The running batch, kept in fixed slots between steps, and each step's tensors made from it.

The driver sends only what changed (`StepInput`). Token ids, computed counts, block tables and
sampling parameters are kept here from step to step, in arrays indexed by slot.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from torch import Tensor

from tpengine.layers.attention import AttentionMetadata, CrossRows
from tpengine.layers.device_values import Int32, Int64
from tpengine.layers.sampler import SamplingBatch, noise_keys
from tpengine.messages import Fork, NewSequence, StepInput
from tpengine.worker.cross_slots import CrossSlots
from tpengine.worker.draft_rows import find_counting, num_drafts_before
from tpengine.worker.picture_slots import PictureSlots
from tpengine.worker.sampling_state import SamplingSlots
from tpengine.worker.transfers import Uploads


@dataclass(slots=True)
class StepArrays:
    """A step's tokens and the fields of its `AttentionMetadata`, on the host.

    Attributes:
        num_scheduled_tokens: int32 `[num_seqs]`, tokens of each row.
        token_types: None: all prompts are one text.
        cross: see `CrossSlots.rows`.
    """

    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    block_table: Int32
    seq_lens: Int32
    query_start_loc: Int32
    num_decodes: int
    num_scheduled_tokens: Int32
    token_types: Int32 | None = None
    cross: tuple[Int32, Int32] | None = None


_device_arrays = attrgetter(
    "token_ids", "positions", "slot_mapping", "block_table", "seq_lens", "query_start_loc"
)
"""Returns what a device gets of `StepArrays`."""


class InputBatch:
    """Slots of the sequences that run on this rank.

    Args:
        num_kept_tokens: see `EngineConfig.num_kept_tokens`.
        processed: see `SamplingSlots`.
        has_axes: whether tokens of pictures have a position on each of three axes.
        max_encoder_len: most tokens of an encoder prompt; 0: the model has one half.

    Attributes:
        token_ids: int32 `[max_num_seqs, max_model_len]`, prompt and output.
        num_tokens, num_computed_tokens: int32 `[max_num_seqs]`.
        block_table: int32 `[max_num_seqs, max_blocks]`.
        sampling: sampling parameters of each slot.
        pictures: where the prompts have pictures.
        cross: the blocks of encoder prompts.
        adapter_slots: int32 `[max_num_seqs]`, slot of the sequence's adapter; -1: none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        uploads: Uploads,
        num_kept_tokens: int = sys.maxsize,
        processed: bool = False,
        has_axes: bool = False,
        max_encoder_len: int = 0,
    ) -> None:
        self.block_size = block_size
        self.uploads = uploads
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_kept_tokens = num_kept_tokens
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._seeds = [0] * max_num_seqs
        self._second_starts: Int32 | None = None  # of pairs of texts; None: there was no pair yet
        self.adapter_slots = np.full(max_num_seqs, -1, np.int32)
        self.sampling = SamplingSlots(max_num_seqs, uploads.device, processed)
        self.pictures = PictureSlots(max_num_seqs, has_axes)
        self.cross = CrossSlots(max_num_seqs, -(-max_encoder_len // block_size))

    def apply(self, step: StepInput) -> None:
        """Applies the driver's changes to the slots, in the order that `StepInput` documents."""
        for slot in step.freed_slots:
            self.sampling.edits.clear(slot)
            self.pictures.leave(slot)
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
            self.sampling.edits.rewrite(slot, self.token_ids[slot, :num_tokens])
        for slot, drafts in step.drafts:  # behind the sequence's tokens, and not counted
            num_tokens = self.num_tokens[slot]
            self.token_ids[slot, num_tokens : num_tokens + len(drafts)] = drafts

    def arrays(
        self,
        row_slots: Sequence[int] | Int64,
        num_scheduled_tokens: Sequence[int],
        computed: Int32 | None = None,
    ) -> StepArrays:
        """Builds the arrays of some rows, by slot, each with its number of tokens to compute.

        Example, block_size 4: slot 7 has computed 5 tokens and adds one, slot 2 has computed 4 and
        adds three.

            slots                 7   2
            num_scheduled_tokens  1   3
            positions             5 | 4  5  6
            block_table[slot]     [9, 3] | [8, 1]
            slot_mapping          3*4+1 | 1*4+0  1*4+1  1*4+2
            seq_lens              6   7
            query_start_loc           0  3          (of the chunks only)

        The token id of a row whose token has not been appended yet is undefined.

        Args:
            computed: int32 `[num_rows]`, the position at which each row begins; None: behind the
                computed tokens.
        """
        slots = np.array(row_slots, np.int64)
        scheduled = np.array(num_scheduled_tokens, np.int32)
        if computed is None:
            computed = self.num_computed_tokens[slots]
        seq_lens = computed + scheduled
        num_decodes = int(np.count_nonzero(scheduled == 1))
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        if num_decodes == len(slots):
            token_slots, positions = slots, computed
            starts = np.zeros(1, np.int32)
        else:
            ends = np.cumsum(scheduled, dtype=np.int32)
            row_of_token = np.repeat(np.arange(len(slots)), scheduled)
            token_slots = slots[row_of_token]
            within_row = np.arange(ends[-1], dtype=np.int32) - (ends - scheduled)[row_of_token]
            positions = computed[row_of_token] + within_row
            starts = np.zeros(len(slots) - num_decodes + 1, np.int32)
            np.cumsum(scheduled[num_decodes:], out=starts[1:])
        token_ids = self.token_ids[token_slots, positions]
        block_ids = self.block_table[token_slots, positions // self.block_size]
        slot_mapping = block_ids * self.block_size + positions % self.block_size
        table = self._kept_blocks(self.block_table[slots, :max_blocks], computed)
        types: Int32 | None = None
        if self._second_starts is not None:
            types = (positions >= self._second_starts[token_slots]).astype(np.int32)
        if self.pictures.has_offsets:
            positions = positions + self.pictures.offsets[token_slots]
        counts, cross = (starts, num_decodes, scheduled), self.cross.rows(token_slots)
        return StepArrays(
            token_ids, positions, slot_mapping, table, seq_lens, *counts, types, cross
        )

    def step_arrays(self, step: StepInput) -> StepArrays:
        """Builds the arrays of a step's rows; a draft has the position behind the row before."""
        slots, computed = np.array(step.slots, np.int64), None
        if step.drafts:
            computed = self.num_computed_tokens[slots] + num_drafts_before(slots)
        return self.arrays(slots, step.num_scheduled_tokens, computed)

    def _kept_blocks(self, table: Int32, computed: Int32) -> Int32:
        """Replaces the blocks that have left the window in every layer; others may hold them now.

        Some kernels read what lies before the window and multiply it by 0. The old blocks may hold
        NaN of another sequence by now, and 0 x NaN is NaN. These places therefore name the first
        block that the row keeps.

        Args:
            table: int32 `[num_seqs, max_blocks]`.
            computed: int32 `[num_seqs]`, computed tokens.
        """
        if self._num_kept_tokens >= self.token_ids.shape[1]:
            return table
        first = np.maximum(computed - self._num_kept_tokens, 0)[:, None] // self.block_size
        kept = np.take_along_axis(table, first, axis=1)
        return np.where(np.arange(table.shape[1]) < first, kept, table)

    def last_positions(self, step: StepInput) -> Tensor | None:
        """Returns the index of each sampled row's last token among the step's tokens, int64; None:
        every token is one, in order. If no row is sampled it returns one token, whose hidden state
        is not read: layers over no rows at all would be a special case in every op."""
        num_rows = len(step.slots)
        if not step.sample_rows:
            return self.uploads.send([np.zeros(1, np.int64)])[0]
        if step.sample_rows == list(range(num_rows)) and max(step.num_scheduled_tokens) == 1:
            return None
        ends = np.cumsum(np.array(step.num_scheduled_tokens, np.int64))
        return self.uploads.send([ends[step.sample_rows] - 1])[0]

    def sampling_batch(self, step: StepInput) -> SamplingBatch:
        """Collects the sampling parameters of `sample_slots`; these slots hold all their tokens."""
        slots = np.array(step.sample_slots, np.int64)
        positions = self.num_tokens[slots]
        if step.drafts:
            positions = positions + num_drafts_before(slots)
        return self.sampling.gather(slots, positions, self.token_ids)

    def note_computed(self, step: StepInput) -> None:
        """Counts the step's tokens as computed, without drafts; the sampled ids may still be on the
        device."""
        # An index that is there several times is added to once: drafts are not counted.
        self.num_computed_tokens[step.slots] += np.array(step.num_scheduled_tokens, np.int32)
        if step.forks:  # a slot that is sampled from its parent's row has computed the same tokens
            parents = np.array(step.slots, np.int64)[step.sample_rows]
            self.num_computed_tokens[step.sample_slots] = self.num_computed_tokens[parents]

    def append(
        self, step: StepInput, sampled: Int64, freed_slots: Collection[int] = ()
    ) -> list[int]:
        """Appends the sampled ids, int64 `[num_samples]`, so that the next message need not contain
        them.

        Args:
            freed_slots: since then; their samples are dropped.

        Returns:
            The indexes of what was sampled after a wrong draft. It is not appended.
        """
        slots = np.array(step.sample_slots, np.int64)
        if freed_slots:
            kept = ~np.isin(slots, list(freed_slots))
            slots, sampled = slots[kept], sampled[kept]
        if not step.drafts:
            self._append(slots, sampled)
            return []
        assert not freed_slots, "a step was begun before the answer of one with drafts"
        drafts = num_drafts_before(slots)
        guesses = self.token_ids[slots, self.num_tokens[slots] + drafts - 1]
        counts = find_counting(drafts, guesses, sampled)
        for number in range(drafts.max() + 1):
            chosen = counts & (drafts == number)
            self._append(slots[chosen], sampled[chosen])
            if number:
                self.num_computed_tokens[slots[chosen]] += 1
        return np.flatnonzero(~counts).tolist()

    def _append(self, slots: Int64, sampled: Int64) -> None:
        """Appends a token to each of these slots, of which no two are the same."""
        ends = self.num_tokens[slots]
        # A sequence of max_model_len tokens has no column for one more. The model never reads that
        # token, because the driver finishes the sequence.
        fits = ends < self.token_ids.shape[1]
        self.token_ids[slots[fits], ends[fits]] = sampled[fits]
        self.sampling.edits.append(slots, sampled, self.token_ids, self.num_tokens)
        self.num_tokens[slots] = ends + 1

    def _enter(self, sequence: NewSequence) -> None:
        slot, count = sequence.slot, len(sequence.token_ids)
        self.token_ids[slot, :count] = sequence.token_ids
        self.num_tokens[slot] = count
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self._num_blocks[slot] = 0
        self._append_blocks(slot, sequence.block_ids)
        self._seeds[slot] = sequence.seed
        self.adapter_slots[slot] = -1 if sequence.adapter_slot is None else sequence.adapter_slot
        self.sampling.write(slot, sequence, noise_keys(sequence.seed, sequence.index))
        self.pictures.enter(slot, sequence.pictures)
        self.cross.enter(slot, sequence.cross)
        start, most = sequence.start_of_second, self.token_ids.shape[1]
        if start is not None and self._second_starts is None:
            self._second_starts = np.full(len(self.token_ids), most, np.int32)
        if self._second_starts is not None:
            self._second_starts[slot] = most if start is None else start

    def _fork(self, fork: Fork) -> None:
        parent, child = fork.parent_slot, fork.child_slot
        num_tokens, num_blocks = self.num_tokens[parent], self._num_blocks[parent]
        self.token_ids[child, :num_tokens] = self.token_ids[parent, :num_tokens]
        self.block_table[child, :num_blocks] = self.block_table[parent, :num_blocks]
        columns = [self.num_tokens, self.num_computed_tokens, self.adapter_slots, self._num_blocks]
        columns.append(self.pictures.offsets)  # the child computes no token of a picture
        for column in columns:
            column[child] = column[parent]
        self.cross.fork(parent, child)
        seed = self._seeds[child] = self._seeds[parent]
        self.sampling.fork(parent, child, noise_keys(seed, fork.index))

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        first = self._num_blocks[slot]
        last = first + len(block_ids)
        self.block_table[slot, first:last] = block_ids
        self._num_blocks[slot] = last


def upload_step(arrays: StepArrays, uploads: Uploads) -> tuple[Tensor, AttentionMetadata]:
    """Sends a step's arrays to the device; returns token ids, int32 `[num_tokens]`, and metadata
    without its `gpu` part."""
    types = [] if arrays.token_types is None else [arrays.token_types]
    sent = uploads.send([*_device_arrays(arrays), *types])
    token_ids, positions, slots, table, seq_lens, starts, *sent_types = sent
    metadata = AttentionMetadata(positions, slots, table, seq_lens, starts, arrays.num_decodes)
    metadata.token_types = sent_types[0] if sent_types else None
    if arrays.cross is not None:
        metadata.cross = CrossRows(*uploads.send(arrays.cross))
    return token_ids, metadata
