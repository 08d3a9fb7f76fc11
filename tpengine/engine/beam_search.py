"""Beam search: which continuations of a request's beams live, which are complete, and when it ends.

The rules are those of `generate(num_beams=k)` in transformers, so that results agree: of all
continuations the best `max(2, 1 + number of end ids) * k` are looked at; those among the first k
that end are complete, and the best k that do not end live on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpengine.engine.prompt_logprobs import as_logprobs
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError
from tpengine.messages import Candidates, TokenLogprobs
from tpengine.outputs import Logprob
from tpengine.scheduling.step import Decisions
from tpengine.sequence import Request, Sequence, SequenceStatus


@dataclass(slots=True)
class CompleteBeam:
    """A beam that has ended.

    Attributes:
        score: cumulative score, divided by the number of output tokens to the length penalty.
        cumulative_logprob: of the raw logits, as is everything that users see.
    """

    score: float
    output_token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[dict[int, Logprob]] | None
    status: SequenceStatus
    stop_reason: int | None


@dataclass(slots=True)
class _Continuation:
    """A beam and a token that may follow it."""

    parent: Sequence
    score: float
    token_id: int
    logprob: float
    rank: int
    found: TokenLogprobs | None


Sampled = tuple[Sequence, Candidates, TokenLogprobs | None]
"""A live beam, its candidates, and the likeliest tokens if users are told of them."""


def num_candidates(num_beams: int, num_end_ids: int) -> int:
    """Continuations that are looked at after every token: enough that, whatever ends, as many as
    there are beams do not."""
    return max(2, 1 + num_end_ids) * num_beams


class BeamSearch:
    """The beams of one request. The live ones are its sequences, the complete ones are kept here.

    Args:
        max_num_tokens: prompt and output tokens at which every beam ends for its length.
    """

    def __init__(self, request: Request, max_num_tokens: int, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._params = request.sampling_params
        self._max_num_tokens = max_num_tokens
        self._tokenizer = tokenizer
        self._scores: dict[int, float] = {}  # cumulative, by id of a live sequence
        self.complete: list[CompleteBeam] = []  # best first, at most as many as beams

    def advance(self, sampled: list[Sampled]) -> Decisions:
        """Chooses the beams that live on after one more token of each, and appends it to them.

        Returns:
            What the scheduler has to do. All sequences of the request are finished if it ended.

        Raises:
            InvalidSamplingParamsError: no beam can go on, and none is complete.
        """
        if sampled[0][0].num_output_tokens == 0:
            sampled = sampled[:1]  # beams start out equal: only one of them counts
        width = self._params.num_sequences
        continuations = self._rank(sampled)[: self._request.num_candidates]
        if not continuations and not self.complete:
            raise InvalidSamplingParamsError(
                "no token can be sampled: allowed_token_ids, bad_words, min_tokens and logits "
                f"processors together rule all of them out after each of {len(sampled)} beams"
            )
        num_tokens = sampled[0][0].num_tokens + 1
        num_output = num_tokens - len(self._request.prompt_token_ids)
        at_limit = num_tokens >= self._max_num_tokens
        living: list[_Continuation] = []
        for place, one in enumerate(continuations):
            if at_limit or one.token_id in self._request.end_token_ids:
                if place < width:
                    self._complete(one, num_output)
            elif len(living) < width:
                living.append(one)
        if not living or self._is_done(living[0].score, num_output):
            self._end()
            return Decisions()
        return self._live_on(living)

    def _rank(self, sampled: list[Sampled]) -> list[_Continuation]:
        """All candidates of all beams, best first; those that are ruled out are left out."""
        found = []
        for sequence, candidates, told in sampled:
            so_far = self._scores.get(sequence.seq_id, 0.0)
            ranks = candidates.ranks if told else [0] * len(candidates.token_ids)
            for token_id, score, logprob, rank in zip(
                candidates.token_ids, candidates.scores, candidates.logprobs, ranks, strict=True
            ):
                if score > float("-inf"):
                    one = _Continuation(sequence, so_far + score, token_id, logprob, rank, told)
                    found.append(one)
        found.sort(key=lambda one: -one.score)
        return found

    def _complete(self, one: _Continuation, num_output: int) -> None:
        """Keeps a beam that ended, if it is among the best."""
        parent, token_id = one.parent, one.token_id
        ended = token_id in self._request.end_token_ids
        is_stop_token = token_id in self._params.stop_token_ids
        self.complete.append(
            CompleteBeam(
                score=one.score / num_output**self._params.length_penalty,
                output_token_ids=[*parent.output_token_ids, token_id],
                cumulative_logprob=parent.cumulative_logprob + one.logprob,
                logprobs=self._extended_logprobs(one),
                status=(
                    SequenceStatus.FINISHED_STOPPED if ended else SequenceStatus.FINISHED_LENGTH
                ),
                stop_reason=token_id if is_stop_token else None,
            )
        )
        self.complete.sort(key=lambda beam: -beam.score)
        del self.complete[self._params.num_sequences :]

    def _is_done(self, best_score: float, num_output: int) -> bool:
        """Whether no live beam can still become better than the complete ones, by the estimate
        that `early_stopping` asks for."""
        params = self._params
        if len(self.complete) < params.num_sequences:
            return False
        if params.early_stopping is True:
            return True
        length = num_output
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_num_tokens - len(self._request.prompt_token_ids)
        return bool(best_score / length**params.length_penalty <= self.complete[-1].score)

    def _end(self) -> None:
        """Finishes the live beams: what they hold is in `complete`, or was not good enough."""
        for sequence in self._request.unfinished_sequences:
            sequence.move_to(SequenceStatus.FINISHED_STOPPED)

    def _live_on(self, living: list[_Continuation]) -> Decisions:
        """Lets each living continuation be one sequence. The first of a parent stays where it is;
        the others take the place of sequences that have none."""
        sequences = self._request.unfinished_sequences
        staying: dict[int, _Continuation] = {}
        moving = []
        for one in living:
            if one.parent.seq_id in staying:
                moving.append(one)
            else:
                staying[one.parent.seq_id] = one
        vacant = [s for s in sequences if s.seq_id not in staying]
        children = list(zip(moving, vacant, strict=False))
        for sequence in vacant[len(children) :]:  # bans left too few continuations
            sequence.move_to(SequenceStatus.FINISHED_STOPPED)
        chosen = [(one, one.parent) for one in staying.values()] + children
        # Of all before any changes: children begin with what their parents had.
        outputs = [
            ([*one.parent.token_ids, one.token_id], self._extended_logprobs(one))
            for one, _ in chosen
        ]
        totals = [one.parent.cumulative_logprob + one.logprob for one, _ in chosen]
        for (one, sequence), (token_ids, logprobs), total in zip(
            chosen, outputs, totals, strict=True
        ):
            sequence.token_ids, sequence.logprobs = token_ids, logprobs
            sequence.cumulative_logprob = total
            self._scores[sequence.seq_id] = one.score
        forks = [(one.parent, child) for one, child in children]
        return Decisions(forks, [sequence for _, sequence in chosen])

    def _extended_logprobs(self, one: _Continuation) -> list[dict[int, Logprob]] | None:
        if one.parent.logprobs is None or one.found is None:
            return None
        found = replace(one.found, logprob=one.logprob, rank=one.rank)
        return [*one.parent.logprobs, as_logprobs(one.token_id, found, self._tokenizer)]
