"""Lookahead: guesses the next tokens of a sequence, so that one step computes several of them.

A guess that a step computes is a draft. It changes no output: see `messages.StepInput`. So all that
is decided here is speed.

Where each decision stands:
    which tokens: `Drafter._guesses`. They are what followed the sequence's last tokens where these
        stood before: in the sequence itself (prompt lookup, as `[ngram]` in vLLM), and for
        `[suffix]` in earlier outputs of the same client too, by frequency (SuffixDecoding, arXiv
        2411.04975). Tokens that a grammar forces come first.
    how likely a guess is right: `_Rates`, from the guesses that came true before: of the request,
        or, of a model, of all requests.
    how many are worth a row: `Drafter.draft`, by the price of a row (`RowPrices`).
    whether to guess at all: `Drafter.begin_step`, by what guesses have saved and cost.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tpengine.config import LookaheadConfig
from tpengine.scheduling.block_manager import BlockManager
from tpengine.scheduling.sequence import Request, Sequence
from tpengine.scheduling.step import Guess, SchedulerOutput, StepBuilder, StepDecisions
from tpengine.scheduling.token_index import Match, TokenIndex

_MAX_RATE = 17
"""Longer matches have one rate."""
_FORCED = 0
"""In place of a length of match: a grammar forces the token."""
_OF_MATCHES = [0.95, *(length / (length + 1.5) for length in range(1, _MAX_RATE + 1))]
"""How often guesses are right, by kind: longer matches more often than short ones."""
_OF_MODEL = [0.7] * (_MAX_RATE + 1)
_FADING = 32
"""Guesses after which older ones count half."""
_PRICE = 0.15
"""Of a row, as a share of a step of one row, until it is measured."""
_PRICE_WEIGHT = 0.5
_NEWEST = 0.05
"""Share of the latest step in what is known about the price."""
_MAX_PRICE = 0.7
"""Share of a step's time per token above which no guess is likely enough to be looked for."""
_HOPE = 0.02
"""Share of the time that guesses may cost if none comes true."""
_MAX_DEBT = 0.2
_MAX_SAVINGS = 1.0
"""Steps; what is above is forgotten."""
_SEPARATOR = -1
"""Stands behind each output of a client; no token has this id."""
_GENERATION_TOKENS = 1 << 15
_MAX_CLIENTS = 64


class DraftStats(NamedTuple):
    """Drafts that were computed, and those of them that came true."""

    num_drafted: int
    num_accepted: int


class _Rates:
    """How often guesses of each kind were right.

    Args:
        usual: of each kind, before any is known.
    """

    def __init__(self, usual: Tokens[float]) -> None:
        self._usual = usual
        self._right = [2 * rate for rate in usual]
        self._all = [2.0] * len(usual)

    def of(self, kind: int) -> float:
        return min(1.0, self._right[kind] / self._all[kind])

    def note(self, kind: int, is_right: bool, share: float = 1.0) -> None:
        """Counts a guess; one that stands at a share of the places only was expected as rarely."""
        if self._all[kind] >= _FADING:
            self._right[kind] /= 2
            self._all[kind] /= 2
        self._right[kind] += is_right
        self._all[kind] += share

    def hope(self) -> None:
        """Moves the rates a little to the usual ones, so that a guess is tried again."""
        for kind, rate in enumerate(self._usual):
            self._right[kind] += _HOPE * (rate - self.of(kind))


class RowPrices:
    """What a row more costs a step, from the times of steps: a line through (rows, seconds) in
    which old steps fade. Until rows vary, their price is a guess."""

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    def note(self, num_rows: int, seconds: float) -> None:
        """Adds a step of so many rows of one token each."""
        if not self._seconds:
            self._rows, self._seconds = float(num_rows), seconds
            return
        # A step that was interrupted says nothing about its rows.
        rows, late = num_rows - self._rows, min(seconds, 3 * self._seconds) - self._seconds
        self._rows += _NEWEST * rows
        self._seconds += _NEWEST * late
        self._variance = (1 - _NEWEST) * (self._variance + _NEWEST * rows * rows)
        self._covariance = (1 - _NEWEST) * (self._covariance + _NEWEST * rows * late)

    def cost(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a step of so many rows, and of another row."""
        usual = self._seconds / (1 + _PRICE * (self._rows - 1)) if self._seconds else 1.0
        weighed = self._covariance + _PRICE_WEIGHT * _PRICE * usual
        row_s = weighed / (self._variance + _PRICE_WEIGHT)
        row_s = min(max(row_s, usual / 64), usual)
        step_s = (self._seconds or 1.0) + row_s * (num_rows - self._rows)
        return max(step_s, row_s * num_rows), row_s


@dataclass(slots=True)
class _Text:
    """A sequence's tokens, what was guessed of them last, and how well that went.

    Attributes:
        guesses: of the tokens that follow `index.tokens`.
        forced: tokens that a grammar forces after `forced_at` tokens.
        is_behind: whether the draft model must read on before it guesses; a draft lets it do so.
    """

    index: TokenIndex
    rates: _Rates
    guesses: list[Guess] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    forced_at: int = 0
    is_behind: bool = False

    def read(self, token_ids: list[int]) -> None:
        """Takes the tokens that are new, and compares them with the guesses."""
        new = token_ids[len(self.index.tokens) :]
        for guess, token_id in zip(self.guesses, new, strict=False):
            self.rates.note(guess.kind, guess.token_id == token_id, guess.share)
            if guess.token_id != token_id:
                break
        self.index.extend(new)


class _Earlier:
    """Earlier outputs of one client, in two generations, of which the older one is dropped when the
    younger one is full."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._old, self._young = TokenIndex(size), TokenIndex(size)

    def add(self, token_ids: list[int]) -> None:
        if len(self._young.tokens) + len(token_ids) > _GENERATION_TOKENS:
            self._old, self._young = self._young, TokenIndex(self._size)
        self._young.extend([*token_ids[-_GENERATION_TOKENS:], _SEPARATOR])

    def find(self, tail: Tokens[int], longest: int) -> list[Match]:
        young, old = self._young.find(tail, longest), self._old.find(tail, longest)
        return young if _length(young) >= _length(old) else old


class Drafter:
    """Chooses the drafts of each step.

    The `kind` of a guess is the length of its match; `_FORCED`; or of a model, its place.

    Attributes:
        wants_drafts: whether a sequence had drafts in the latest step, or would have had some if no
            other step had been in flight: they are likely to be worth more than a step that is
            planned ahead.
    """

    def __init__(self, config: LookaheadConfig) -> None:
        self._config = config
        self.wants_drafts = False
        self._texts: dict[int, _Text] = {}  # by id of the sequence
        self._earlier: OrderedDict[tuple[str, str], _Earlier] | None = None
        if config.speculative_model == "[suffix]":
            self._earlier = OrderedDict()
        # A model is as good for one request as for another, and too dear to be tried by each.
        self._of_model = None if config.draft_model is None else _Rates(_OF_MODEL)
        self._prices = RowPrices()
        self._num_tokens = self._step_s = self._row_s = 0.0  # of the step that is being chosen
        self._plain_s = self._token_s = 1.0  # of that step without drafts, and of a token of it
        self._savings = _MAX_SAVINGS  # steps whose time guesses have saved
        self._stats: dict[tuple[str, int], DraftStats] = {}

    def add_to(
        self,
        step: StepBuilder,
        request_of: Mapping[int, Request],
        blocks: BlockManager,
        max_rows: int,
        is_alone: bool,
    ) -> None:
        """Gives drafts to sequences that a step samples after one token, where rows, tokens and
        free blocks are left. The step preempts no request for them; a later one may, as the blocks
        of rejected drafts stay with their sequence, for its next tokens.

        Args:
            request_of: the request of each sequence that runs, by the sequence's id.
            is_alone: whether no step is unanswered; else it gets none.
        """
        start = time.perf_counter()
        self.wants_drafts = False
        rows_left = max_rows - len(request_of)
        if self.begin_step(len(request_of)) and not step.lacks_blocks:
            parents = [parent for parent, _ in step.forks]
            for sequence, _ in step.singles:
                request, num_tokens = request_of[sequence.seq_id], sequence.num_tokens
                # Processors are functions of users, which may count their calls.
                has_none = request.num_candidates or request.rules.logits_processors
                if has_none or sequence in parents or sequence.num_behind > 1:
                    continue
                most = min(step.tokens_left, rows_left, sequence.max_num_tokens - num_tokens - 1)
                most = min(most, blocks.num_places(sequence) - num_tokens)
                drafts = self.draft(request, sequence, max(0, most))
                self.wants_drafts = self.wants_drafts or bool(drafts)
                if drafts and is_alone:
                    if block_ids := blocks.reserve(sequence, num_tokens + len(drafts)):
                        step.add_blocks(sequence, block_ids)
                    step.add_drafts(sequence, drafts)
                    rows_left -= len(drafts)
        self.note_guessing(time.perf_counter() - start)

    def note_answer(
        self, output: SchedulerOutput, decisions: StepDecisions, blocks: BlockManager, step_s: float
    ) -> None:
        """Counts the drafts that came true as computed, of a step that took `step_s` seconds."""
        for sequence, drafts in output.drafts.items():
            if sequence.slot is not None:  # else it ended while the step was in flight
                num_accepted = sequence.num_tokens - sequence.num_computed_tokens - 1
                self.count(sequence, drafts, num_accepted, sequence.slot in decisions.behind)
                sequence.num_computed_tokens += num_accepted
                blocks.mark_computed(sequence, sequence.num_computed_tokens)
        for sequence, token_ids in decisions.forced:
            self.note_forced(sequence, token_ids)
        if output.rows and not output.num_prefill_tokens:
            self.note_step(len(output.rows), step_s)

    def begin_step(self, num_sequences: int) -> bool:
        """Begins to choose drafts for a step in which so many sequences get a token.

        Returns:
            Whether there may be any: False if the step has so many rows that no draft pays, or if
            guesses have cost more time than they saved.
        """
        self._num_tokens = num_sequences
        self._step_s, self._row_s = self._prices.cost(num_sequences)
        self._plain_s, self._token_s = self._step_s, self._step_s / num_sequences
        self._save(_HOPE * self._plain_s)
        if self._of_model is not None:
            self._of_model.hope()
        limit = self._config.speculative_disable_by_batch_size
        is_small = limit is None or num_sequences <= limit
        return is_small and self._lowest_chance < _MAX_PRICE and self._savings > 0

    @property
    def _lowest_chance(self) -> float:
        """How likely a draft must be right, so that the step with it gives as many tokens per
        second as without."""
        return self._num_tokens * self._row_s / self._step_s

    def draft(self, request: Request, sequence: Sequence, most: int) -> list[Guess]:
        """Returns the drafts that are worth a row each; `count` tells what became of them.

        Args:
            most: drafts that have room.
        """
        config = self._config
        if sequence.num_tokens >= config.speculative_max_model_len:
            self._texts.pop(sequence.seq_id, None)
            return []
        text = self._texts.get(sequence.seq_id)
        if text is None:
            index, rates = TokenIndex(config.ngram_prompt_lookup_min), self._of_model
            text = self._texts[sequence.seq_id] = _Text(index, rates or _Rates(_OF_MATCHES))
        if config.draft_model is None:
            text.read(sequence.token_ids)
        most = min(most, 1) if text.is_behind else most
        chance, drafts, text.guesses = 1.0, list[Guess](), list[Guess]()
        for guess in islice(self._guesses(request, sequence, text), config.num_speculative_tokens):
            text.guesses.append(guess)
            chance *= guess.share * text.rates.of(guess.kind)
            if len(drafts) >= most or chance <= self._lowest_chance:
                break
            drafts.append(guess)
            self._num_tokens += chance
            self._step_s += self._row_s
        return drafts

    def _guesses(self, request: Request, sequence: Sequence, text: _Text) -> Iterator[Guess]:
        """The likeliest tokens, one after another."""
        if self._config.draft_model is not None:
            for place in range(1, self._config.num_speculative_tokens + 1):
                yield Guess(0, "model", min(place, _MAX_RATE))
            return
        forced = text.forced if text.forced_at == sequence.num_tokens else []
        yield from (Guess(token_id, "grammar", _FORCED) for token_id in forced)
        longest = self._config.ngram_prompt_lookup_max
        tail = [*sequence.token_ids[-longest:], *forced]
        places, source = text.index.find(tail, longest), "text"
        if self._earlier is None:
            places = places[:1]
        elif (earlier := self._earlier.get(_client(request))) is not None:
            others = earlier.find(tail, longest)
            if _length(others) > _length(places):
                places, source = others, "earlier"
            elif _length(others) == _length(places):
                places = [*places, *others]
        length = _length(places)
        for token_id, share in _follow(places, forced):
            yield Guess(token_id, source, min(length, _MAX_RATE), share)
            length += 1

    def note_forced(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Takes the tokens that a grammar forces after the sequence's last one."""
        text = self._texts.get(sequence.seq_id)
        if text is not None:
            text.forced, text.forced_at = token_ids, sequence.num_tokens

    def note_guessing(self, seconds: float) -> None:
        """Takes the time that the choice of a step's drafts took."""
        self._save(-seconds)

    def _save(self, seconds: float) -> None:
        savings = self._savings + seconds / self._plain_s
        self._savings = min(max(savings, -_MAX_DEBT), _MAX_SAVINGS)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """Takes the time from the answer before, or the choice of its drafts if that was later, to
        the answer of a step whose rows have one token each. Not only the ranks' time: rows cost the
        driver some, too, and the step that would else have been in flight."""
        self._prices.note(num_rows, seconds)

    def count(
        self, sequence: Sequence, guesses: list[Guess], num_accepted: int, is_behind: bool = False
    ) -> None:
        """Counts the drafts of a sequence in an answered step.

        Args:
            is_behind: the draft model has not read the sequence, so that these are no guesses.
        """
        text = self._texts.get(sequence.seq_id)
        if text is not None:
            text.is_behind = is_behind
        if is_behind:
            return
        self._save(num_accepted * self._token_s - len(guesses) * self._row_s)
        if text is not None and self._config.draft_model is not None:
            for place, guess in enumerate(guesses[: num_accepted + 1]):
                text.rates.note(guess.kind, place < num_accepted)
        for position, guess in enumerate(guesses):
            before = self._stats.get((guess.source, position), DraftStats(0, 0))
            counts = before.num_drafted + 1, before.num_accepted + (position < num_accepted)
            self._stats[guess.source, position] = DraftStats(*counts)

    def stats(self) -> dict[tuple[str, int], DraftStats]:
        """By source and place among a sequence's drafts, from 0. Any thread may ask."""
        return self._stats.copy()

    def leave(self, request: Request) -> None:
        """Forgets a request, and keeps its outputs for later ones of its client."""
        for sequence in request.sequences:
            self._texts.pop(sequence.seq_id, None)
            if self._earlier is not None and sequence.num_output_tokens:
                earlier = self._earlier.setdefault(
                    _client(request), _Earlier(self._config.ngram_prompt_lookup_min)
                )
                self._earlier.move_to_end(_client(request))
                earlier.add(sequence.output_token_ids)
                if len(self._earlier) > _MAX_CLIENTS:
                    self._earlier.popitem(last=False)


def _client(request: Request) -> tuple[str, str]:
    return request.owner.account, request.owner.cache_salt


def _length(matches: list[Match]) -> int:
    return matches[0].length if matches else 0


def _follow(places: list[Match], forced: list[int]) -> Iterator[tuple[int, float]]:
    """The likeliest tokens after a match, each with the share of the places at which it follows;
    only places with all tokens before it go on. A text that ends goes on with what is forced and
    chosen: it repeats itself."""
    beyond = forced.copy()
    while places:
        offset = len(beyond) - len(forced)
        following = [_token_at(match, offset, beyond) for match in places]
        token_id, number = following[0], 1
        if len(places) > 1:
            ((token_id, number),) = Counter(following).most_common(1)
        if token_id == _SEPARATOR:
            return
        yield token_id, number / len(places)
        places = [m for m, after in zip(places, following, strict=True) if after == token_id]
        beyond.append(token_id)


def _token_at(match: Match, offset: int, beyond: list[int]) -> int:
    place = match.end + offset
    return match.tokens[place] if place < len(match.tokens) else beyond[place - len(match.tokens)]
