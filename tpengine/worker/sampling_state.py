"""Sampling parameters of the running sequences, in arrays indexed by slot.

Written when a sequence enters, gathered each step: no Python object is touched per token, except
for those sequences that ask for bans or processors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tpengine.errors import InvalidSamplingParamsError
from tpengine.layers.device_values import upload
from tpengine.layers.logit_edits import LogitEdits, Penalties, ProcessorCall, TokenCounts
from tpengine.layers.sampler import SamplingBatch
from tpengine.logits_processors import LogitsProcessor, load_logits_processor
from tpengine.messages import NewSequence
from tpengine.sampling_params import SamplingParams
from tpengine.worker.token_rules import TokenRules

_NO_LOGPROBS = -1
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class SamplingSlots:
    """Arrays of `[max_num_seqs]`; neutral values switch a stage off for a slot.

    Attributes:
        num_prompt_logprobs: likeliest tokens to report per prompt position; -1: not asked for.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.noise_key = np.zeros(max_num_seqs, np.uint64)
        self.num_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self.num_candidates = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, _NO_LOGPROBS, np.int32)
        self.repetition_penalty = np.ones(max_num_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, np.float32)
        self.has_penalties = np.zeros(max_num_seqs, np.bool_)
        self._counts = TokenCounts(max_num_seqs, device)
        self._rules = TokenRules(device)
        self._processors: dict[int, list[LogitsProcessor]] = {}

    def write(self, slot: int, sequence: NewSequence, noise_key: np.uint64) -> None:
        """Notes the parameters of a sequence that enters."""
        params = sequence.sampling_params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k or 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.noise_key[slot] = noise_key
        self.num_logprobs[slot] = _num_logprobs(params)
        self.num_candidates[slot] = sequence.num_candidates
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        wanted = params.prompt_logprobs
        self.num_prompt_logprobs[slot] = _NO_LOGPROBS if wanted is None else wanted
        self.repetition_penalty[slot] = params.repetition_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.has_penalties[slot] = params.has_penalties
        self._rules.write(slot, sequence)
        self._processors.pop(slot, None)
        if params.logits_processors:
            self._processors[slot] = [_load(path) for path in params.logits_processors]
        self.rewrite(slot, np.array(sequence.token_ids, np.int32))

    def rewrite(self, slot: int, token_ids: Int32) -> None:
        """Counts a sequence's tokens anew, after the driver has replaced one.

        Args:
            token_ids: prompt and output.
        """
        if not self.has_penalties[slot]:
            self._counts.clear(slot)
            return
        self._counts.write(slot, *self._penalised(slot, token_ids))

    def append(
        self, slots: Int64, sampled: Int64, token_ids: Int32, num_tokens: Int32 | Int64
    ) -> None:
        """Notes a token that was sampled for each of `slots`.

        Args:
            token_ids: `[max_num_seqs, max_model_len]`, tokens of every slot.
            num_tokens: `[max_num_seqs]`, how many of them came before.
        """
        if self._counts.is_empty:
            return

        def count_distinct(slot: int) -> int:
            tokens = self._penalised(slot, token_ids[slot, : num_tokens[slot]])
            return len(np.unique(np.concatenate(tokens)))

        self._counts.append(slots, sampled, count_distinct)

    def _penalised(self, slot: int, token_ids: Int32) -> tuple[Int32, Int32]:
        """Those tokens of prompt and output at which the slot's penalties look."""
        prompt, output = np.split(token_ids, [self.num_prompt_tokens[slot]])
        if self.repetition_penalty[slot] == 1.0:
            prompt = prompt[:0]  # the other penalties look at the output only
        return prompt, output

    def fork(self, parent_slot: int, child_slot: int, noise_key: np.uint64) -> None:
        """Lets a child sample as its parent does, with noise of its own."""
        for array in (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.num_logprobs,
            self.num_candidates,
            self.num_prompt_tokens,
            self.num_prompt_logprobs,
            self.repetition_penalty,
            self.frequency_penalty,
            self.presence_penalty,
            self.has_penalties,
        ):
            array[child_slot] = array[parent_slot]
        self.noise_key[child_slot] = noise_key
        self._counts.fork(parent_slot, child_slot)
        self._rules.fork(parent_slot, child_slot)
        self._processors.pop(child_slot, None)
        if parent_slot in self._processors:
            self._processors[child_slot] = self._processors[parent_slot]

    def clear(self, slot: int) -> None:
        """Forgets what would make later steps slower; the rest is overwritten on entry."""
        self.has_penalties[slot] = False
        self.num_prompt_logprobs[slot] = _NO_LOGPROBS
        self._counts.clear(slot)
        self._rules.clear(slot)
        self._processors.pop(slot, None)

    def gather(self, slots: Int64, positions: Int32, token_ids: Int32) -> SamplingBatch:
        """The parameters of one step's samples.

        Args:
            slots: `[num_samples]`.
            positions: `[num_samples]`, index that each sampled token will have in its sequence.
            token_ids: `[max_num_seqs, max_model_len]`, tokens of every slot.
        """
        return SamplingBatch(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            noise_key=self.noise_key[slots],
            positions=positions,
            num_logprobs=self.num_logprobs[slots],
            num_candidates=self.num_candidates[slots],
            edits=self._edits(slots, positions, token_ids),
        )

    def _edits(self, slots: Int64, positions: Int32, token_ids: Int32) -> LogitEdits | None:
        if self._rules.is_empty and self._counts.is_empty and not self._processors:
            return None
        edits = LogitEdits()
        if not self._rules.is_empty:
            static = self._rules.static_edits(slots)
            rows = static.rows_with_rules
            now = self._rules.bans_now(rows, slots, token_ids, positions)
            edits.bias, edits.allowed = static.bias, static.allowed
            edits.banned = [entries for entries in (static.banned, now) if entries is not None]
        if self._processors:
            edits.processors = self._processor_calls(slots, positions, token_ids)
        edits.penalties = self._penalties(slots)
        return None if edits.is_empty else edits

    def _penalties(self, slots: Int64) -> Penalties | None:
        rows = np.flatnonzero(self.has_penalties[slots])
        if len(rows) == 0:
            return None
        penalised = slots[rows]
        return Penalties(
            rows=self._tensor(rows),
            tokens=self._counts.gather(penalised),
            repetition=self._tensor(self.repetition_penalty[penalised]),
            frequency=self._tensor(self.frequency_penalty[penalised]),
            presence=self._tensor(self.presence_penalty[penalised]),
        )

    def _processor_calls(
        self, slots: Int64, positions: Int32, token_ids: Int32
    ) -> list[ProcessorCall]:
        calls = []
        for row, slot in enumerate(slots.tolist()):
            processors = self._processors.get(slot)
            if processors is not None:
                tokens = token_ids[slot, : positions[row]].tolist()
                start = int(self.num_prompt_tokens[slot])
                calls.append(ProcessorCall(row, processors, tokens[:start], tokens[start:]))
        return calls

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload(array, self._device)


def _num_logprobs(params: SamplingParams) -> int:
    if params.logprobs is not None:
        return params.logprobs
    ranked = params.best_of is not None and params.best_of > params.n
    return 0 if ranked else _NO_LOGPROBS  # 0: the chosen token's only


def _load(path: str) -> LogitsProcessor:
    """A processor that this machine lacks, unlike the driver's, fails when it is called."""
    try:
        return load_logits_processor(path)
    except InvalidSamplingParamsError as error:
        return _failing(path, error)


def _failing(path: str, error: InvalidSamplingParamsError) -> LogitsProcessor:
    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise error

    return LogitsProcessor(path, fail, wants_prompt=False)
