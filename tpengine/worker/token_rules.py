"""Rules about tokens: biases, bans, allowed tokens and logits processors of the running sequences.

`TokenRules` holds them by slot, for the sequences that ask for some, and makes the edits of one
step's logits of them (`layers/logit_edits.py` applies these).
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
from tpengine.layers.logit_edits import AllowedTokens, Entries, LogitEdits, ProcessorCall
from tpengine.messages import NewSequence
from tpengine.sampling_params import LoadedProcessor, LogitsProcessor, load_logits_processor

_ID_BYTES = 4


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
