"""Sampling parameters of the running sequences, by slot.

`SamplingSlots` holds numbers in arrays, written when a sequence enters and gathered each step: no
Python object is touched per token. What edits logits before they are sampled is in `EditSlots`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tpengine.layers.device_values import Int32, Int64
from tpengine.layers.sampler import RAW_ALONE, Filters, SamplingBatch
from tpengine.messages import NewSequence
from tpengine.worker.edit_slots import EditSlots

_NO_LOGPROBS = -1


class SamplingSlots:
    """Arrays of `[max_num_seqs]`; neutral values switch a stage of sampling off for a slot.

    Args:
        processed: whether log probabilities are those of the processed logits.

    Attributes:
        edits: of the logits, by slot.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, processed: bool = False) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.noise_key = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self.num_candidates = np.zeros(max_num_seqs, np.int32)
        self._arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        self._processed = processed
        self.edits = EditSlots(max_num_seqs, device)

    def write(self, slot: int, sequence: NewSequence, noise_key: np.uint64) -> None:
        """Writes the parameters of a sequence that enters."""
        rules = sequence.rules
        self.temperature[slot] = rules.temperature
        self.top_k[slot] = max(rules.top_k, 0)  # -1: all
        self.top_p[slot] = rules.top_p
        self.min_p[slot] = rules.min_p
        self.noise_key[slot] = noise_key
        self.num_candidates[slot] = sequence.num_candidates
        self.edits.write(slot, sequence)
        self.num_logprobs[slot] = _NO_LOGPROBS if rules.logprobs is None else rules.logprobs
        if rules.logprobs is None and not (sequence.num_candidates or self._is_plain(slot)):
            self.num_logprobs[slot] = 0 if self._processed else RAW_ALONE

    def _is_plain(self, slot: int) -> bool:
        """Whether the log probability that the sampling kernel gives for a sequence's tokens is the
        one to report, see `SamplingBatch.num_logprobs`."""
        if not self._processed:
            return slot not in self.edits
        temperature, top_k, top_p, min_p = (float(array[slot]) for array in self.filters)
        return temperature == 0 or (temperature, top_k, top_p, min_p) == (1, 0, 1, 0)

    @property
    def filters(self) -> Filters:
        """See `SamplingBatch.filters`, of all slots."""
        return [self.temperature, self.top_k, self.top_p, self.min_p]

    def fork(self, parent_slot: int, child_slot: int, noise_key: np.uint64) -> None:
        """Gives a child the parameters of its parent, with its own noise."""
        for array in self._arrays:
            array[child_slot] = array[parent_slot]
        self.noise_key[child_slot] = noise_key
        self.edits.fork(parent_slot, child_slot)

    def gather(self, slots: Int64, positions: Int32, token_ids: Int32) -> SamplingBatch:
        """Collects the parameters of one step's samples.

        Args:
            slots: `[num_samples]`; a slot that follows itself is sampled after a draft.
            positions: `[num_samples]`, index that each sampled token will have in its sequence.
            token_ids: `[max_num_seqs, max_model_len]`, tokens of every slot, and behind them its
                drafts.
        """
        return replace(
            self.gather_plain(slots, positions),
            num_logprobs=self.num_logprobs[slots],
            num_candidates=self.num_candidates[slots],
            edits=self.edits.gather(slots, positions, token_ids),
            processed=self._processed,
        )

    def gather_plain(self, slots: Int64, positions: Int32) -> SamplingBatch:
        """The same without edits of logits, and without reports beside the tokens."""
        none = np.zeros(len(slots), np.int32)
        return SamplingBatch(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            noise_key=self.noise_key[slots],
            positions=positions,
            num_logprobs=none + _NO_LOGPROBS,
            num_candidates=none,
        )
