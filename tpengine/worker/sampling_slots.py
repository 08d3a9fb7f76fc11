"""Sampling parameters of the running sequences, in arrays indexed by slot.

Written when a sequence enters, gathered each step: no Python object is touched per token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tpengine.layers.sampler import SamplingBatch
from tpengine.messages import NewSequence

_NO_LOGPROBS = -1


class SamplingSlots:
    """Arrays of `[max_num_seqs]`; neutral values switch a stage off for a slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.noise_key = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self.first_end_position = np.zeros(max_num_seqs, np.int32)
        self._end_token_ids: dict[int, list[int]] = {}

    def write(self, slot: int, sequence: NewSequence, noise_key: np.uint64) -> None:
        """Notes the parameters of a sequence that enters."""
        params = sequence.sampling_params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k or 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.noise_key[slot] = noise_key
        self.num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.first_end_position[slot] = sequence.num_prompt_tokens + params.min_tokens
        if sequence.end_token_ids:
            self._end_token_ids[slot] = sequence.end_token_ids
        else:
            self._end_token_ids.pop(slot, None)

    def clear(self, slot: int) -> None:
        """Forgets what would make later steps slower; the rest is overwritten on entry."""
        self._end_token_ids.pop(slot, None)

    def gather(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int32]
    ) -> SamplingBatch:
        """The parameters of one step's samples.

        Args:
            slots: `[num_samples]`.
            positions: `[num_samples]`, index that each sampled token will have in its sequence.
        """
        banned = []
        if self._end_token_ids:
            for row, slot in enumerate(slots.tolist()):
                ids = self._end_token_ids.get(slot)
                if ids is not None and positions[row] < self.first_end_position[slot]:
                    banned.append((row, ids))
        return SamplingBatch(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            noise_key=self.noise_key[slots],
            positions=positions,
            num_logprobs=self.num_logprobs[slots],
            banned_token_ids=banned,
        )
