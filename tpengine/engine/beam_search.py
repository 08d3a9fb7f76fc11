"""Beam search: which continuations of a request's beams live on, which are complete, and when the
search ends.

The rules are those of `generate(num_beams=k)` in transformers, so that results agree: of all
continuations, those among the first k that end are complete, and the best k that do not end live
on. A beam has at most k continuations that live on, so its best k and as many as may end are enough
to look at, while transformers takes the best `max(2, 1 + number of end ids) * k` of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tpengine.engine.detokenizer import as_logprobs
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError
from tpengine.messages import Candidates, TokenLogprobs
from tpengine.outputs import CompletionOutput, SampleLogprobs
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus
from tpengine.scheduling.step import StepDecisions


@dataclass(frozen=True, slots=True)
class _LiveBeam:
    """What is known of a live beam, in addition to the tokens of its sequence.

    Attributes:
        score: cumulative; with bias, bans and penalties.
        cumulative_logprob: sum of `Candidates.logprobs`.
        logprobs: by output token; None unless the request asks for them.
    """

    score: float
    cumulative_logprob: float
    logprobs: SampleLogprobs | None


@dataclass(slots=True)
class _Continuation:
    """A beam and a token that may follow it."""

    parent: Sequence
    score: float
    token_id: int
    logprob: float
    rank: int
    logprobs: TokenLogprobs | None


Sampled = tuple[Sequence, Candidates, TokenLogprobs | None]
"""A live beam, its candidates, and the likeliest tokens if the request asks for logprobs."""


def stop_token(token_id: int, request: Request, tokenizer: Tokenizer | None) -> int | None:
    """The `stop_reason` of a sequence that this token ended: the token, or None if it is the
    tokenizer's end token, as in vLLM 0.5.4."""
    is_eos = tokenizer is not None and token_id == tokenizer.eos_token_id
    return None if is_eos and not request.sampling_params.ignore_eos else token_id


def num_candidates(num_beams: int, num_end_ids: int) -> int:
    """Continuations of each beam that are looked at: enough that `num_beams` of them do not end."""
    return num_beams + num_end_ids


class BeamSearch:
    """The beams of one request. Live beams are its sequences; complete beams are kept here."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request, encoder = request, request.encoder
        num_forced = 0 if encoder is None else encoder.num_forced
        self._num_before = len(request.prompt_token_ids) - num_forced
        self._params = request.sampling_params
        self._max_num_tokens = request.sequences[0].max_num_tokens
        self._tokenizer = tokenizer
        logprobs: SampleLogprobs | None = None if self._params.logprobs is None else []
        self._live = {s.seq_id: _LiveBeam(0.0, 0.0, logprobs) for s in request.sequences}
        # (score, output) of complete beams, best first, at most as many as beams. The score is the
        # cumulative one, divided by the number of output tokens to the power of the length penalty.
        self._complete: list[tuple[float, CompletionOutput]] = []

    def advance(self, sampled: list[Sampled], decisions: StepDecisions) -> None:
        """Chooses the beams that live on after one more token of each.

        Args:
            decisions: of the step; they get the tokens and forks of the beams that live on. All
                sequences of the request finish if the search ends: what they hold is complete, or
                was not good enough.

        Raises:
            InvalidSamplingParamsError: no beam can go on, and none is complete.
        """
        if sampled[0][0].num_output_tokens == 0:
            sampled = sampled[:1]  # beams start out equal: only one of them counts
        width = self._params.num_sequences
        continuations = self._best_continuations(sampled)
        if not continuations and not self._complete:
            raise InvalidSamplingParamsError(
                "no token can be sampled: structured_outputs, allowed_token_ids, bad_words, "
                "min_tokens and logits processors together rule all of them out after each of "
                f"{len(sampled)} beams"
            )
        num_tokens = sampled[0][0].num_tokens + 1
        num_output = num_tokens - self._num_before
        at_limit = num_tokens >= self._max_num_tokens
        living: list[_Continuation] = []
        for place, continuation in enumerate(continuations):
            if at_limit or continuation.token_id in self._request.end_token_ids:
                if place < width:
                    self._keep(continuation, num_output)
            elif len(living) < width:
                living.append(continuation)
        if not living or self._is_done(living[0].score, num_output):
            _stop(self._request.unfinished_sequences, decisions)
        else:
            self._live_on(living, decisions)

    def best(self) -> list[CompletionOutput]:
        """The best n beams of a finished request, best first and without text: complete beams, or
        the live ones if the request was ended from outside."""
        request, n = self._request, self._params.n
        if request.finish_reason is None:
            return [output for _, output in self._complete[:n]]
        live = [(self._live[sequence.seq_id], sequence) for sequence in request.sequences]
        live.sort(key=lambda pair: -pair[0].cumulative_logprob)
        return [
            _output(sequence.output_token_ids, beam, request.finish_reason)
            for beam, sequence in live[:n]
        ]

    def _best_continuations(self, sampled: list[Sampled]) -> list[_Continuation]:
        """The continuations that may be sampled, best first, up to the last one that can live on.

        There are some for each beam and each end id, so none of them is touched by itself before
        the best are known.
        """
        width, ends = self._params.num_sequences, self._request.end_token_ids
        candidates = [of_beam for _, of_beam, _ in sampled]
        counts = [len(of_beam.token_ids) for of_beam in candidates]
        parent = np.repeat(np.arange(len(sampled)), counts)
        place = np.concatenate([np.arange(count) for count in counts])
        token_ids = np.concatenate([of_beam.token_ids for of_beam in candidates])
        so_far = np.array([self._live[sequence.seq_id].score for sequence, _, _ in sampled])
        scores = np.concatenate([of_beam.scores for of_beam in candidates]) + so_far[parent]
        is_end = np.isin(token_ids, np.array([*ends], np.int64))
        may_be_sampled = scores > -np.inf  # neither banned nor NaN
        living = scores[may_be_sampled & ~is_end]
        least = np.partition(living, -width)[-width] if len(living) > width else -np.inf
        best = np.flatnonzero(may_be_sampled & (scores >= least))
        best = best[np.argsort(-scores[best], kind="stable")]
        best = best[(np.arange(len(best)) < width) | ~is_end[best]]
        continuations = []
        for at in best.tolist():
            sequence, of_beam, likeliest = sampled[parent[at]]
            i, score = place[at], float(scores[at])
            token_id, logprob = of_beam.token_ids[i], of_beam.logprobs[i]
            rank = of_beam.ranks[i] if likeliest else 0
            continuations.append(_Continuation(sequence, score, token_id, logprob, rank, likeliest))
        return continuations

    def _keep(self, end: _Continuation, num_output: int) -> None:
        """Keeps a beam that ended, if it is among the best."""
        token_id, score = end.token_id, end.score / num_output**self._params.length_penalty
        if len(self._complete) == self._params.num_sequences and score <= self._complete[-1][0]:
            return
        is_end = token_id in self._request.end_token_ids
        reason = "stop" if is_end else "length"
        output = _output([*end.parent.output_token_ids, token_id], self._extend(end), reason)
        if is_end:
            output.stop_reason = stop_token(token_id, self._request, self._tokenizer)
        self._complete.append((score, output))
        self._complete.sort(key=lambda beam: -beam[0])
        del self._complete[self._params.num_sequences :]

    def _is_done(self, best_score: float, num_output: int) -> bool:
        """Whether no live beam can become better than the complete ones, by the estimate that
        `early_stopping` asks for."""
        params = self._params
        if len(self._complete) < params.num_sequences:
            return False
        if params.early_stopping is True:
            return True
        length = num_output
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = self._max_num_tokens - self._num_before
        return bool(best_score / length**params.length_penalty <= self._complete[-1][0])

    def _live_on(self, living: list[_Continuation], decisions: StepDecisions) -> None:
        """Gives each living continuation a sequence. The first one of a parent keeps the parent's
        sequence; the others take sequences whose beam has no living continuation."""
        staying: dict[int, _Continuation] = {}
        moving = []
        for continuation in living:
            if continuation.parent.seq_id in staying:
                moving.append(continuation)
            else:
                staying[continuation.parent.seq_id] = continuation
        vacant = [s for s in self._request.unfinished_sequences if s.seq_id not in staying]
        children = list(zip(moving, vacant, strict=False))
        chosen = [(stays, stays.parent) for stays in staying.values()] + children
        self._live |= {sequence.seq_id: self._extend(beam) for beam, sequence in chosen}
        decisions.tokens.extend((sequence, beam.token_id) for beam, sequence in chosen)
        decisions.forks.extend((beam.parent, child) for beam, child in children)
        decisions.overridden.extend(sequence for _, sequence in chosen)
        _stop(vacant[len(children) :], decisions)  # bans left too few continuations

    def _extend(self, new: _Continuation) -> _LiveBeam:
        """The parent's beam with the continuation's token."""
        parent, logprobs = self._live[new.parent.seq_id], None
        if parent.logprobs is not None and new.logprobs is not None:
            chosen = replace(new.logprobs, logprob=new.logprob, rank=new.rank)
            tokenizer = self._tokenizer if self._params.detokenize else None
            logprobs = [*parent.logprobs, as_logprobs(new.token_id, chosen, tokenizer)]
        return _LiveBeam(new.score, parent.cumulative_logprob + new.logprob, logprobs)


def _stop(sequences: Iterable[Sequence], decisions: StepDecisions) -> None:
    decisions.finished.extend((s, SequenceStatus.FINISHED_STOPPED) for s in sequences)


def _output(token_ids: list[int], beam: _LiveBeam, finish_reason: str) -> CompletionOutput:
    total = beam.cumulative_logprob
    return CompletionOutput(0, "", tuple(token_ids), total, beam.logprobs, finish_reason)
