"""Biases, bans and allowed tokens of the running sequences, by slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.device_values import upload
from tpengine.layers.logit_edits import AllowedTokens, Entries
from tpengine.messages import NewSequence

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Words:
    """Banned words of `length` tokens: all but the last `[num_words, length - 1]`, and the last."""

    beginnings: Int32
    last_ids: Int64


@dataclass(slots=True)
class _Rules:
    """What one sequence asks for."""

    bias_ids: Int64
    bias: npt.NDArray[np.float32]
    allowed_ids: Int64 | None
    banned_ids: Int64
    """Always: bad words of one token."""
    early_banned_ids: Int64
    """Before `first_end_position`."""
    first_end_position: int
    words: list[_Words] = field(default_factory=list)

    def banned_now(self, token_ids: Int32) -> list[Int64]:
        """Ids that must not follow these tokens, besides `banned_ids`."""
        found = []
        if len(self.early_banned_ids) and len(token_ids) < self.first_end_position:
            found.append(self.early_banned_ids)
        for words in self.words:
            length = words.beginnings.shape[1]
            if length > len(token_ids):
                continue
            hits = (words.beginnings == token_ids[-length:]).all(axis=1)
            if hits.any():
                found.append(words.last_ids[hits])
        return found


@dataclass(slots=True)
class StaticEdits:
    """Those edits of a step's rows that do not depend on what has been generated."""

    bias: tuple[Entries, torch.Tensor] | None
    allowed: AllowedTokens | None
    banned: Entries | None
    rows_with_rules: list[int]


class TokenRules:
    """Rules of the slots that have some.

    The tensors of the rules that never change are kept while the same slots are sampled in the
    same order, as they are from one decode to the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rules: dict[int, _Rules] = {}
        self._cached: tuple[bytes, StaticEdits] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no slot has rules."""
        return not self._rules

    def write(self, slot: int, sequence: NewSequence) -> None:
        """Notes the rules of a sequence that enters."""
        self.clear(slot)
        params = sequence.sampling_params
        words = params.bad_words_token_ids
        if not (params.logit_bias or words or sequence.end_token_ids or params.allowed_token_ids):
            return
        bias = params.logit_bias or {}
        allowed = params.allowed_token_ids
        self._rules[slot] = _Rules(
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias=np.fromiter(bias.values(), np.float32, len(bias)),
            allowed_ids=None if allowed is None else np.unique(np.array(allowed, np.int64)),
            banned_ids=np.array([word[0] for word in words if len(word) == 1], np.int64),
            early_banned_ids=np.array(sequence.end_token_ids, np.int64),
            first_end_position=sequence.num_prompt_tokens + params.min_tokens,
            words=_group(words),
        )
        self._cached = None

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """The child has the parent's rules."""
        self.clear(child_slot)
        rules = self._rules.get(parent_slot)
        if rules is not None:
            self._rules[child_slot] = rules
            self._cached = None

    def clear(self, slot: int) -> None:
        """Forgets a slot's rules."""
        if self._rules.pop(slot, None) is not None:
            self._cached = None

    def static_edits(self, slots: Int64) -> StaticEdits:
        """Biases, allowed tokens and constant bans of the rows that sample for `slots`."""
        key = slots.tobytes()
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._make_static(slots))
        return self._cached[1]

    def bans_now(
        self, rows: Sequence[int], slots: Int64, token_ids: Int32, positions: Int32
    ) -> Entries | None:
        """Bans that depend on the tokens so far.

        Args:
            rows: rows with rules.
            slots: `[num_samples]`, of all rows.
            token_ids: `[max_num_seqs, max_model_len]`, of all slots.
            positions: `[num_samples]`, number of tokens so far.
        """
        found: list[tuple[int, Int64]] = []
        for row in rows:
            slot = int(slots[row])
            rules = self._rules[slot]
            if rules.words or len(rules.early_banned_ids):
                tokens = token_ids[slot, : positions[row]]
                found += [(row, ids) for ids in rules.banned_now(tokens)]
        return self._entries(found)

    def _make_static(self, slots: Int64) -> StaticEdits:
        of_row = {
            row: self._rules[slot] for row, slot in enumerate(slots.tolist()) if slot in self._rules
        }

        def collect(pick: Callable[[_Rules], Int64 | None]) -> list[tuple[int, Int64]]:
            picked = ((row, pick(rules)) for row, rules in of_row.items())
            return [(row, ids) for row, ids in picked if ids is not None]

        bias = self._entries(collect(lambda rules: rules.bias_ids))
        allowed = collect(lambda rules: rules.allowed_ids)
        entries = self._entries(allowed)
        values = [rules.bias for rules in of_row.values()]
        return StaticEdits(
            bias=None if bias is None else (bias, self._tensor(np.concatenate(values))),
            allowed=(
                None
                if entries is None
                else AllowedTokens(self._tensor(np.array([row for row, _ in allowed])), entries)
            ),
            banned=self._entries(collect(lambda rules: rules.banned_ids)),
            rows_with_rules=list(of_row),
        )

    def _entries(self, found: Sequence[tuple[int, Int64]]) -> Entries | None:
        sizes = [len(ids) for _, ids in found]
        if not sum(sizes):
            return None
        rows = np.repeat(np.array([row for row, _ in found], np.int64), sizes)
        return Entries(self._tensor(rows), self._tensor(np.concatenate([ids for _, ids in found])))

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return upload(array, self._device)


def _group(words: Iterable[Sequence[int]]) -> list[_Words]:
    """Words of several tokens by their length, so that those of one are compared at once."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for word in words:
        if len(word) > 1:
            by_length.setdefault(len(word), []).append(word)
    grouped = []
    for same_length in by_length.values():
        ids = np.array(same_length, np.int32)
        grouped.append(_Words(ids[:, :-1], ids[:, -1].astype(np.int64)))
    return grouped
