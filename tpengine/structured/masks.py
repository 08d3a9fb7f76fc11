"""The grammars that the outputs of some slots follow, and their masks of allowed tokens.

Only rank 0, which samples, makes masks. They are made in a thread while the layers run. A matcher
lags behind its sequence: it takes a token only when the mask after it is made, or, with lookahead,
to find the tokens that must follow. By then the driver has replaced the tokens that it replaces
(beam search), and drafts are not taken, so no matcher ever goes back. After a preemption or a loss
it takes all output tokens that the sequence returns with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tpengine.errors import InvalidSamplingParamsError
from tpengine.layers.device_values import Int32, Int64
from tpengine.layers.logit_edits import FilledMasks, TokenMasks
from tpengine.messages import NewSequence, RowError
from tpengine.structured.grammars import Vocabulary, reason

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(slots=True)
class _Followed:
    """The grammar of one sequence.

    Attributes:
        grammar: see `SamplingRules.grammar`.
        num_taken: tokens of the sequence that the matcher has behind it, those of the prompt too.
        first_end: number of tokens before which the sequence should not end, see `min_tokens`.
        end_ids: tokens that would end it.
        is_beam: whether the driver may replace its tokens.
        matcher: None: no mask has been made yet.
    """

    grammar: str
    num_taken: int
    first_end: int
    end_ids: Int64
    is_beam: bool
    matcher: LLMatcher | None = None

    def take(self, token_ids: list[int], vocabulary: Vocabulary) -> LLMatcher:
        """Takes the tokens that follow; returns the matcher, whose error may say that one of them
        is not allowed.

        Raises:
            InvalidSamplingParamsError: this rank cannot compile what the driver could.
        """
        if self.matcher is None:
            self.matcher = vocabulary.matcher(self.grammar)
        self.matcher.consume_tokens(token_ids)
        self.num_taken += len(token_ids)
        return self.matcher

    def ban_early_ends(self, bits: Int32, num_drafts: int) -> None:
        """Removes the tokens that would end the sequence too early from its mask after so many
        drafts, unless no other is allowed: where the grammar is complete, the sequence ends."""
        if self.num_taken + num_drafts < self.first_end:
            others = bits.view(np.uint8).copy()
            bans = np.left_shift(1, self.end_ids & 7).astype(np.uint8)
            np.bitwise_and.at(others, self.end_ids >> 3, ~bans)
            if others.any():
                bits[:] = others.view(np.int32)


@dataclass(slots=True)
class _Work:
    """The masks of one sequence.

    Attributes:
        place: of its first mask; one follows for each draft. The mask after a draft that the
            grammar forbids is empty.
        token_ids: for the matcher to take.
    """

    grammar: _Followed
    place: int
    token_ids: list[int]
    drafts: list[int] = field(default_factory=list)


class GrammarSlots:
    """The slots whose output follows a grammar.

    Attributes:
        vocabulary: set before the first mask; None: the driver has not sent it.
    """

    def __init__(self) -> None:
        self.vocabulary: Vocabulary | None = None
        self._followed: dict[int, _Followed] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no output follows a grammar."""
        return not self._followed

    def __contains__(self, slot: int) -> bool:
        return slot in self._followed

    def write(self, slot: int, sequence: NewSequence) -> None:
        """Writes the grammar of a sequence that enters, if it has one."""
        self.clear(slot)
        rules, start = sequence.rules, sequence.num_prompt_tokens
        if rules.grammar is not None:
            ends = np.array(sequence.end_token_ids, np.int64)
            first_end, is_beam = start + rules.min_tokens, sequence.num_candidates > 0
            self._followed[slot] = _Followed(rules.grammar, start, first_end, ends, is_beam)

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """Gives a child the grammar of its parent, at the same place."""
        self.clear(child_slot)
        parent = self._followed.get(parent_slot)
        if parent is not None:
            matcher = None if parent.matcher is None else parent.matcher.deep_copy()
            self._followed[child_slot] = replace(parent, matcher=matcher)

    def clear(self, slot: int) -> None:
        """Removes a slot's grammar."""
        self._followed.pop(slot, None)

    def begin_masks(self, slots: Int64, positions: Int32, token_ids: Int32) -> TokenMasks | None:
        """Begins to make the masks of one step's samples; None: none follows a grammar. See
        `SamplingSlots.gather` for the arguments."""
        rows, work = list[int](), list[_Work]()
        previous = None
        for row, slot in enumerate(slots.tolist()):
            grammar = self._followed.get(slot)
            if grammar is not None:
                if slot == previous:
                    work[-1].drafts.append(int(token_ids[slot, positions[row] - 1]))
                else:
                    new_ids = token_ids[slot, grammar.num_taken : positions[row]].tolist()
                    work.append(_Work(grammar, len(rows), new_ids))
                rows.append(row)
            previous = slot
        if not rows:
            return None
        assert self.vocabulary is not None, "the driver sends it before the first grammar"
        return TokenMasks(np.array(rows, np.int64), self._submit(work, len(rows), self.vocabulary))

    def find_forced(
        self,
        sample_slots: Sequence[int],
        rejected: Collection[int],
        token_ids: Int32,
        num_tokens: Int32,
        most: int,
    ) -> dict[int, list[int]]:
        """Finds the tokens, at most `most`, that must follow the last token of each sequence,
        because its grammar allows no other text; by its index among the samples. Lets their
        matchers take all tokens, so not while masks are made. Not of beams: the driver replaces
        their tokens.

        Args:
            sample_slots: of a step.
            rejected: indexes of samples that do not count.
            token_ids: `[max_num_seqs, max_model_len]`, tokens of every slot.
            num_tokens: `[max_num_seqs]`, how many there are.
        """
        last = {slot: at for at, slot in enumerate(sample_slots) if at not in rejected}
        forced: dict[int, list[int]] = {}
        for slot, at in last.items():
            grammar = self._followed.get(slot)
            if grammar is None or grammar.matcher is None or grammar.is_beam:
                continue
            matcher, end = grammar.matcher, int(num_tokens[slot])
            matcher.consume_tokens(token_ids[slot, grammar.num_taken : end].tolist())
            grammar.num_taken = end
            if not matcher.is_error() and (ids := matcher.compute_ff_tokens()):
                forced[at] = ids[:most]
        return forced

    def _submit(
        self, work: list[_Work], num_masks: int, vocabulary: Vocabulary
    ) -> Future[FilledMasks]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        try:
            return self._thread.submit(self._fill, work, num_masks, vocabulary)
        except RuntimeError:  # the system has no thread left: the step waits for the masks
            self._thread = None
            filled: Future[FilledMasks] = Future()
            filled.set_result(self._fill(work, num_masks, vocabulary))
            return filled

    def _fill(self, work: list[_Work], num_masks: int, vocabulary: Vocabulary) -> FilledMasks:
        """Makes the masks. An error leaves the mask empty; the library would allow the end."""
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor()
        bits = np.zeros((num_masks, -(-vocabulary.size // 32)), np.int32)
        errors: dict[int, RowError] = {}
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for part in work:
            try:
                matcher = part.grammar.take(part.token_ids, vocabulary)
            except InvalidSamplingParamsError as error:
                errors[part.place] = RowError(str(error), error.field)
                continue
            if part.drafts:
                drafted.append((matcher, part.place, part.drafts))
            else:
                plain.append((matcher, part.place))
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, bits)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, bits)
        for part in work:
            if part.place in errors:
                continue
            own = bits[part.place : part.place + 1 + len(part.drafts)]
            matcher = part.grammar.matcher
            if matcher is not None and matcher.is_error():
                own[:] = 0
                text = f"structured_outputs cannot be followed: {reason(matcher)}"
                errors[part.place] = RowError(text, "structured_outputs")
            for num_drafts, mask in enumerate(own):
                part.grammar.ban_early_ends(mask, num_drafts)
        return FilledMasks(bits, errors)
