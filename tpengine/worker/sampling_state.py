"""Sampling parameters of the running sequences, by slot.

`SamplingSlots` holds numbers in arrays, written when a sequence enters and gathered each step: no
Python object is touched per token. `TokenRules` holds what needs objects, for the sequences that
ask for biases, bans, allowed tokens or logits processors. The counts of tokens that penalties need
(`TokenCounts` of `logit_edits`) are kept here, too.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.device_values import Int32, Int64, upload
from tpengine.layers.logit_edits import (
    AllowedTokens,
    Entries,
    LogitEdits,
    Penalties,
    ProcessorCall,
    TokenCounts,
)
from tpengine.layers.sampler import RAW_ALONE, Filters, SamplingBatch
from tpengine.messages import NewSequence
from tpengine.sampling_params import LoadedProcessor, LogitsProcessor, load_logits_processor
from tpengine.structured.masks import GrammarSlots

_NO_LOGPROBS = -1
_ID_BYTES = 4
_AS_IN_RULES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "has_penalties"),
)
"""Columns whose numbers are those of the rules."""


class SamplingSlots:
    """Arrays of `[max_num_seqs]`; neutral values switch a stage of sampling off for a slot.

    Args:
        processed: whether log probabilities are those of the processed logits.

    Attributes:
        num_prompt_logprobs: likeliest tokens to report per prompt position; -1: not asked for.
        grammars: of the slots whose output follows one.
    """

    def __init__(self, max_num_seqs: int, device: torch.device, processed: bool = False) -> None:
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
        self._arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        self._device = device
        self._processed = processed
        self._counts = TokenCounts(max_num_seqs, device)
        self._rules = TokenRules(device)
        self.grammars = GrammarSlots()

    def write(self, slot: int, sequence: NewSequence, noise_key: np.uint64) -> None:
        """Writes the parameters of a sequence that enters."""
        rules = sequence.rules
        for name in _AS_IN_RULES:
            getattr(self, name)[slot] = getattr(rules, name)
        self.top_k[slot] = max(rules.top_k, 0)  # -1: all
        self.noise_key[slot] = noise_key
        self.num_candidates[slot] = sequence.num_candidates
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_prompt_logprobs[slot] = _count_logprobs(rules.prompt_logprobs)
        self._rules.write(slot, sequence)
        self.grammars.write(slot, sequence)
        self.num_logprobs[slot] = _count_logprobs(rules.logprobs)
        if rules.logprobs is None and not (sequence.num_candidates or self._is_plain(slot)):
            self.num_logprobs[slot] = 0 if self._processed else RAW_ALONE
        self.rewrite(slot, np.array(sequence.token_ids, np.int32))

    def _is_plain(self, slot: int) -> bool:
        """Whether the log probability that the sampling kernel gives for a sequence's tokens is the
        one to report, see `SamplingBatch.num_logprobs`."""
        if not self._processed:
            edited = self.has_penalties[slot] or slot in self._rules
            return not (edited or slot in self.grammars)
        temperature, top_k, top_p, min_p = (float(array[slot]) for array in self.filters)
        return temperature == 0 or (temperature, top_k, top_p, min_p) == (1, 0, 1, 0)

    @property
    def filters(self) -> Filters:
        """See `SamplingBatch.filters`, of all slots."""
        return [self.temperature, self.top_k, self.top_p, self.min_p]

    def prompt_filters(self, slot: int) -> Filters | None:
        """The filters `[1]` of a prompt's log probabilities; None: these are of the raw logits."""
        if not self._processed:
            return None
        return [column[slot : slot + 1] for column in self.filters]

    def rewrite(self, slot: int, token_ids: Int32) -> None:
        """Counts a sequence's tokens again, after the driver has replaced one.

        Args:
            token_ids: prompt and output.
        """
        if self.has_penalties[slot]:
            self._counts.write(slot, *self._penalised(slot, token_ids))
        else:
            self._counts.clear(slot)

    def append(self, slots: Int64, sampled: Int64, token_ids: Int32, num_tokens: Int32) -> None:
        """Counts a token that was sampled for each of `slots`.

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
        """Returns the tokens of prompt and output that the slot's penalties count."""
        prompt, output = np.split(token_ids, [self.num_prompt_tokens[slot]])
        if self.repetition_penalty[slot] == 1.0:
            prompt = prompt[:0]  # the other penalties count the output only
        return prompt, output

    def fork(self, parent_slot: int, child_slot: int, noise_key: np.uint64) -> None:
        """Gives a child the parameters of its parent, with its own noise."""
        for array in self._arrays:
            array[child_slot] = array[parent_slot]
        self.noise_key[child_slot] = noise_key
        self._counts.fork(parent_slot, child_slot)
        self._rules.fork(parent_slot, child_slot)
        self.grammars.fork(parent_slot, child_slot)

    def clear(self, slot: int) -> None:
        """Removes what would make later steps slower; the rest is overwritten on entry."""
        self.has_penalties[slot] = False
        self.num_prompt_logprobs[slot] = _NO_LOGPROBS
        self._counts.clear(slot)
        self._rules.clear(slot)
        self.grammars.clear(slot)

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
            edits=self._edits(slots, positions, token_ids),
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

    def _edits(self, slots: Int64, positions: Int32, token_ids: Int32) -> LogitEdits | None:
        if self._rules.is_empty and self._counts.is_empty and self.grammars.is_empty:
            return None
        edits = self._rules.edits(slots, positions, token_ids)
        edits.masks = self.grammars.begin_masks(slots, positions, token_ids)
        edits.penalties = self._penalties(slots, positions, token_ids)
        return None if edits.is_empty else edits

    def _penalties(self, slots: Int64, positions: Int32, token_ids: Int32) -> Penalties | None:
        rows = np.flatnonzero(self.has_penalties[slots])
        if len(rows) == 0:
            return None
        penalised, ends = slots[rows], positions[rows]
        counts = num_drafts_before(penalised)
        # The first draft of each row that has one, then the second of each that has two, and so on.
        drafts = [
            (later, token_ids[penalised[later], (ends - counts)[later] + number].astype(np.int64))
            for number in range(counts.max())
            if (later := np.flatnonzero(counts > number)).size
        ]
        return Penalties(
            rows=upload(rows, self._device),
            tokens=self._counts.gather(penalised, drafts),
            repetition=upload(self.repetition_penalty[penalised], self._device),
            frequency=upload(self.frequency_penalty[penalised], self._device),
            presence=upload(self.presence_penalty[penalised], self._device),
        )


def num_drafts_before(slots: Int64) -> Int32:
    """Counts the drafts up to each row, its own one included: how often its slot has followed
    itself. `[num_rows]`.

    Example: the slots 7 7 7 2 give 0 1 2 0.
    """
    rows = np.arange(len(slots), dtype=np.int32)
    is_own = np.ones(len(slots), np.bool_)
    is_own[1:] = slots[1:] != slots[:-1]
    return rows - np.maximum.accumulate(np.where(is_own, rows, 0))


def _count_logprobs(wanted: int | None) -> int:
    return _NO_LOGPROBS if wanted is None else wanted


def _load(source: LogitsProcessor | str | bytes) -> LoadedProcessor:
    """Loads a processor: a function, its name, or its bytes, which this machine's user has pickled.
    If the driver's machine has what it needs and this one does not, the returned processor raises
    the error when it is called, so that only its request fails."""
    try:
        return load_logits_processor(pickle.loads(source) if isinstance(source, bytes) else source)
    except Exception as error:  # unpickling may raise anything
        reason = error

    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise reason

    return LoadedProcessor(source if isinstance(source, str) else "of the driver", fail, False)


class BadWords:
    """Bad words of several tokens, found by what stands before their last tokens: the beginnings.

    Beginnings are kept backwards, as bytes, in a sorted list. If one of them ends a text, it begins
    the text that is read backwards. All that do so begin the last one that does not come after this
    text in the list. So the number of words and their lengths cost a step next to nothing.

    Args:
        words: ids of each, at least 2.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        last_ids: dict[bytes, list[int]] = {}
        for word in words:
            last_ids.setdefault(_backwards(np.array(word[:-1], np.int32)), []).append(word[-1])
        self._beginnings = sorted(last_ids)
        self._last_ids = [last_ids[beginning] for beginning in self._beginnings]
        self._num_tail = max(map(len, self._beginnings)) // _ID_BYTES
        # Places of all beginnings that each one begins with, the shortest first, and its own.
        self._chains: list[list[int]] = []
        chain: list[int] = []
        for place, beginning in enumerate(self._beginnings):
            while chain and not beginning.startswith(self._beginnings[chain[-1]]):
                chain.pop()
            chain.append(place)
            self._chains.append(chain.copy())
        self._banned: dict[int, Int64] = {}

    def banned_after(self, token_ids: Int32) -> Int64 | None:
        """Returns the ids that would complete a word after these tokens; None: no id would."""
        tail = _backwards(token_ids[-self._num_tail :])
        last = bisect_right(self._beginnings, tail) - 1
        if last < 0:
            return None
        chain = self._chains[last]
        # The shortest come first: if one of them does not begin the tail, no longer one does.
        count = bisect_left(chain, True, key=lambda at: not tail.startswith(self._beginnings[at]))
        return self._banned_by(chain[:count]) if count else None

    def _banned_by(self, chain: list[int]) -> Int64:
        if chain[-1] not in self._banned:
            ids = [token_id for place in chain for token_id in self._last_ids[place]]
            self._banned[chain[-1]] = np.unique(np.array(ids, np.int64))
        return self._banned[chain[-1]]


def _backwards(token_ids: Int32) -> bytes:
    """Ids from the last to the first, each as bytes that are ordered as the ids are."""
    return token_ids[::-1].astype(">u4").tobytes()


@dataclass(frozen=True, slots=True)
class _Rules:
    """What one sequence asks for."""

    bias_ids: Int64
    bias: npt.NDArray[np.float32]
    allowed_ids: Int64 | None
    banned_ids: Int64
    """At every position: bad words of one token."""
    early_banned_ids: Int64
    """Before `first_end_position`."""
    first_end_position: int
    not_first_ids: Int64
    words: BadWords | None
    """Those of several tokens; None: there are none."""
    num_prompt_tokens: int
    processors: list[LoadedProcessor]

    def banned_after(self, token_ids: Int32) -> list[Int64]:
        """Returns the ids that must not follow these tokens, besides `banned_ids`."""
        banned = []
        if len(self.early_banned_ids) and len(token_ids) < self.first_end_position:
            banned.append(self.early_banned_ids)
        if len(self.not_first_ids) and len(token_ids) == self.num_prompt_tokens:
            banned.append(self.not_first_ids)
        if self.words is not None and (ids := self.words.banned_after(token_ids)) is not None:
            banned.append(ids)
        return banned

    def call(self, row: int, token_ids: list[int]) -> ProcessorCall:
        """The call of the processors after these tokens."""
        prompt, output = token_ids[: self.num_prompt_tokens], token_ids[self.num_prompt_tokens :]
        return ProcessorCall(row, self.processors, prompt, output)


class TokenRules:
    """Biases, bans, allowed tokens and logits processors of the slots that have some.

    The tensors of rules that do not depend on the tokens so far are kept as long as the same slots
    are sampled in the same order, as from one decode step to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rules: dict[int, _Rules] = {}
        self._cached: tuple[bytes, dict[int, _Rules], LogitEdits] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no slot has rules."""
        return not self._rules

    def __contains__(self, slot: int) -> bool:
        return slot in self._rules

    def write(self, slot: int, sequence: NewSequence) -> None:
        """Writes the rules of a sequence that enters."""
        self.clear(slot)
        rules = sequence.rules
        words, allowed = rules.bad_words_token_ids, rules.allowed_token_ids
        ends = sequence.end_token_ids if rules.grammar is None else []  # else its masks ban them
        processors = [_load(processor) for processor in rules.logits_processors or ()]
        not_first = rules.not_first_token_ids
        if not (rules.logit_bias or words or ends or allowed or processors or not_first):
            return
        bias, long = rules.logit_bias or {}, [word for word in words if len(word) > 1]
        self._rules[slot] = _Rules(
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
            allowed_ids=None if allowed is None else np.unique(np.array(allowed, np.int64)),
            banned_ids=np.array([word[0] for word in words if len(word) == 1], np.int64),
            early_banned_ids=np.array(ends, np.int64),
            first_end_position=sequence.num_prompt_tokens + rules.min_tokens,
            not_first_ids=np.array(not_first, np.int64),
            words=BadWords(long) if long else None,
            num_prompt_tokens=sequence.num_prompt_tokens,
            processors=processors,
        )
        self._cached = None

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """Gives a child the rules of its parent."""
        self.clear(child_slot)
        if parent_slot in self._rules:
            self._rules[child_slot] = self._rules[parent_slot]
            self._cached = None

    def clear(self, slot: int) -> None:
        """Removes a slot's rules."""
        if self._rules.pop(slot, None) is not None:
            self._cached = None

    def edits(self, slots: Int64, positions: Int32, token_ids: Int32) -> LogitEdits:
        """Returns biases, allowed tokens, bans and processors of one step's samples, see
        `SamplingSlots.gather`."""
        key = slots.tobytes()
        if self._cached is None or self._cached[0] != key:
            slot_of_row = enumerate(slots.tolist())
            of_row = {row: self._rules[slot] for row, slot in slot_of_row if slot in self._rules}
            self._cached = key, of_row, self._static_edits(of_row)
        _, of_row, static = self._cached
        now = self._entries(
            (row, ids)
            for row, rules in of_row.items()
            for ids in rules.banned_after(token_ids[slots[row], : positions[row]])
        )
        calls = [
            rules.call(row, token_ids[slots[row], : positions[row]].tolist())
            for row, rules in of_row.items()
            if rules.processors
        ]
        banned = static.banned if now is None else [*static.banned, now]
        return replace(static, processors=calls, banned=banned)

    def _static_edits(self, of_row: dict[int, _Rules]) -> LogitEdits:
        """Returns the edits that do not depend on the tokens so far."""

        def collect(pick: Callable[[_Rules], Int64 | None]) -> Entries | None:
            picked = ((row, pick(rules)) for row, rules in of_row.items())
            return self._entries((row, ids) for row, ids in picked if ids is not None)

        edits = LogitEdits()
        bias = collect(lambda rules: rules.bias_ids)
        if bias is not None:
            values = np.concatenate([rules.bias for rules in of_row.values()])
            edits.bias = bias, upload(values, self._device)
        allowed = collect(lambda rules: rules.allowed_ids)
        if allowed is not None:
            rows = [row for row, rules in of_row.items() if rules.allowed_ids is not None]
            edits.allowed = AllowedTokens(upload(np.array(rows), self._device), allowed)
        banned = collect(lambda rules: rules.banned_ids)
        if banned is not None:
            edits.banned = [banned]
        return edits

    def _entries(self, ids_by_row: Iterable[tuple[int, Int64]]) -> Entries | None:
        """Returns the entries (row, id) of ids by row; None: there are none."""
        pairs = list(ids_by_row)
        sizes = [len(ids) for _, ids in pairs]
        if not sum(sizes):
            return None
        rows = np.repeat(np.array([row for row, _ in pairs], np.int64), sizes)
        ids = np.concatenate([ids for _, ids in pairs])
        return Entries(upload(rows, self._device), upload(ids, self._device))
