"""From sampled ids to what a user sees: text, the decision that a sequence ends, `RequestOutput`.

Every stop decision, and with it a `finish_reason` of stop or length, is made here in
`OutputProcessor._decide_end` (for beams: in `beam_search`). The reasons abort and error, and
length for a request that is ignored, come from the scheduler; `sequence.SequenceStatus` maps a
status to its `finish_reason`.

`process` changes no `Sequence`, and of a `Request` only the `metrics`; texts and log probabilities
are in this module's own objects, which it does change. It returns its decisions, which
`Scheduler.update` applies. After that, `report` builds what users are told.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from tpengine.config import PoolingConfig
from tpengine.engine.beam_search import BeamSearch, Sampled, stop_token
from tpengine.engine.detokenizer import Detokenizer, as_logprobs
from tpengine.engine.pooled_outputs import finish_outputs
from tpengine.engine.stats import EngineCounters
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError, RequestError, RequestFailedError
from tpengine.logger import init_logger
from tpengine.messages import PromptLogprobs, RowError, StepOutput
from tpengine.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from tpengine.outputs import PromptLogprobs as PromptCandidates
from tpengine.sampling_params import RequestOutputKind
from tpengine.scheduling.sequence import Request, Sequence, SequenceStatus
from tpengine.scheduling.step import SchedulerOutput, StepDecisions

logger = init_logger(__name__)


@dataclass(slots=True, eq=False)
class _TrackedSequence:
    """A sequence while its request is unfinished, with what only this module knows of it.

    Attributes:
        detokenizer: None: the output has no text, or the text is made at the end (beams).
        logprobs: by output token; None unless the request asks for them.
        num_reported: output tokens that have been reported.
        is_end_reported: whether its finish reason has been, too.
        stop_reason: the stop string or stop token that ended the sequence.
        pooled: see `RequestOutput`.
    """

    request: Request
    sequence: Sequence
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None = None
    cumulative_logprob: float = 0.0
    num_reported: int = 0
    is_end_reported: bool = False
    stop_reason: int | str | None = None
    pooled: array[float] | None = None

    def has_news(self) -> bool:
        """Whether it has a token that was not reported, or its end."""
        if self.sequence.num_output_tokens > self.num_reported:
            return True
        return self.sequence.status.finished and not self.is_end_reported


@dataclass(slots=True, eq=False)
class _TrackedRequest:
    """An unfinished request.

    Attributes:
        beams: None: no beam search.
        prompt_token_ids, encoder_token_ids: for its outputs, which the caller may change.
        prompt_logprobs: by position of the prompt, None for positions that are not computed yet;
            None unless the request asks for them, and after they were reported as a delta.
        num_reported: output tokens of all sequences that have been reported.
        failure: why a part of the text is missing.
    """

    request: Request
    prompt_token_ids: list[int]
    encoder_token_ids: list[int] | None
    sequences: list[_TrackedSequence] = field(default_factory=list)
    beams: BeamSearch | None = None
    prompt_logprobs: PromptCandidates | None = None
    num_reported: int = 0
    failure: RequestError | None = None


@dataclass(eq=False, repr=False)
class OutputProcessor:
    """Follows the output of every request from `add` until the report of its end.

    Args:
        tokenizer: None: outputs have ids and no text.
        pooling: what the model gives in the place of tokens; None: it generates.
        counters: where tokens and ends of requests are counted.
        stream_interval: tokens that are reported together, after the first.
    """

    tokenizer: Tokenizer | None
    pooling: PoolingConfig | None = None
    _counters: EngineCounters = field(default_factory=EngineCounters)
    _stream_interval: int = 1
    _requests: dict[str, _TrackedRequest] = field(default_factory=dict)
    _sequences: dict[int, _TrackedSequence] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        """Starts to follow a request.

        Raises:
            Exception: the tokenizer's own error; the request is not followed.
        """
        params = request.sampling_params
        encoder_ids = None if request.encoder is None else request.encoder.token_ids.copy()
        tracked = _TrackedRequest(request, request.prompt_token_ids.copy(), encoder_ids)
        if params.use_beam_search:
            tracked.beams = BeamSearch(request, self.tokenizer)
        if params.prompt_logprobs is not None:
            tracked.prompt_logprobs = [None] * len(request.prompt_token_ids)
        for sequence in request.sequences:
            detokenizer = None if params.use_beam_search else self._make_detokenizer(request)
            logprobs: SampleLogprobs | None = None if params.logprobs is None else []
            output = _TrackedSequence(request, sequence, detokenizer, logprobs)
            tracked.sequences.append(output)
            self._sequences[sequence.seq_id] = output
        self._requests[request.request_id] = tracked

    def process(self, scheduled: SchedulerOutput, output: StepOutput) -> StepDecisions:
        """Decides for an answered step which tokens are appended and which sequences end.

        An error in the processing of one request ends that request alone.
        """
        problems = {key: why for key, why in output.load_results.items() if why is not None}
        decisions = StepDecisions(
            failed_loads=list(problems),
            computed_pictures=[key for key in output.load_results if key not in problems],
            behind=output.behind,
        )
        beams: dict[str, list[Sampled]] = {}
        now = time.time()
        for row, part in output.prompt_logprobs.items():
            tracked = self._sequences.get(scheduled.rows[row].seq_id)
            if tracked is None:
                continue
            try:
                self._record_prompt_logprobs(tracked.request, part)
            except Exception as error:
                _fail(tracked.request, error, decisions)
        if problems:
            self._fail_waiting(problems, decisions)
        rejected, previous, num_before = set(output.rejected), None, 0
        for place, sequence in enumerate(scheduled.sampled):
            num_before = num_before + 1 if sequence is previous else 0
            previous = sequence
            if num_before and (place in rejected or decisions.ends(sequence)):
                continue
            tracked = self._sequences.get(sequence.seq_id)
            if tracked is None or sequence.status.finished:  # it ended while the step was in flight
                continue
            request = tracked.request
            if request.request_id in decisions.failed:
                continue
            if place in output.pooled:
                self._take_pooled(tracked, output.pooled[place], decisions)
                continue
            if place in output.errors:
                _fail(request, _of_row(output.errors[place]), decisions)
                continue
            self._counters.record_token(request, now, decisions)
            if request.sampling_params.use_beam_search:
                sampled = (sequence, output.candidates[place], output.logprobs.get(place))
                beams.setdefault(request.request_id, []).append(sampled)
                continue
            decisions.tokens.append((sequence, output.token_ids[place]))
            try:
                status = self._take_token(tracked, place, output, num_before)
            except Exception as error:
                _fail(request, error, decisions)
                continue
            if status is not None:
                decisions.finished.append((sequence, status))
            if status is not None or self._is_due(tracked, num_before):
                decisions.to_report[request.request_id] = request
            if place in output.forced:
                decisions.forced.append((sequence, output.forced[place]))
        for request_id, group in beams.items():
            if request_id not in decisions.failed:
                self._advance_beams(self._requests[request_id], group, decisions)
        return decisions

    def _take_pooled(
        self, tracked: _TrackedSequence, values: bytes, decisions: StepDecisions
    ) -> None:
        """Ends a sequence of a model that makes no tokens with what it gave, as the request wants
        it."""
        request = tracked.request
        assert self.pooling is not None
        assert request.pooling_params is not None
        try:
            tracked.pooled = finish_outputs(values, request.pooling_params, self.pooling)
        except Exception as error:
            _fail(request, error, decisions)
            return
        self._counters.record_prompt(request)
        decisions.finished.append((tracked.sequence, SequenceStatus.FINISHED_STOPPED))
        decisions.to_report[request.request_id] = request

    def _fail_waiting(self, problems: Mapping[bytes, str], decisions: StepDecisions) -> None:
        """Ends running requests that wait for what could not be loaded; not only those with rows:
        beams that were swapped in may have none in this step."""
        for known in self._requests.values():
            is_running = any(s.slot is not None for s in known.request.sequences)
            for key in known.request.awaited_keys if is_running else ():
                if key in problems:
                    _fail(known.request, RequestFailedError(problems[key]), decisions)

    def report(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """The outputs of these requests now, as their `output_kind` asks.

        A finished request is forgotten. If the end of its text cannot be decoded, that part is left
        out and the output has an error.
        """
        now = time.time()
        outputs = []
        for request in requests:
            tracked, finished = self._requests[request.request_id], request.finished
            params = request.sampling_params
            final_only = params.output_kind is RequestOutputKind.FINAL_ONLY or params.is_ranked
            if final_only and not finished:
                continue
            if finished:
                self._counters.record_finish(request, now)
                self._finish_texts(tracked)
            outputs.append(self._output(tracked, finished))
            if finished:
                self.forget(request)
        return outputs

    def _output(self, tracked: _TrackedRequest, finished: bool) -> RequestOutput:
        request, prompt_logprobs = tracked.request, tracked.prompt_logprobs
        if prompt_logprobs is not None and None in prompt_logprobs[1:]:
            prompt_logprobs = None
        completions, encoder = self._completions(tracked), request.encoder
        if request.sampling_params.output_kind is RequestOutputKind.DELTA:
            tracked.prompt_logprobs = None
        else:
            tracked.num_reported = 0
        for completion in completions:
            tracked.num_reported += len(completion.token_ids)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tracked.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=finished,
            metrics=request.metrics,
            lora_request=None if request.adapter is None else request.adapter.request,
            failure=request.error or tracked.failure,
            num_cached_tokens=request.metrics.num_cached_tokens,
            num_output_tokens=tracked.num_reported,
            pooled=tracked.sequences[0].pooled,
            encoder_prompt=None if encoder is None else encoder.prompt,
            encoder_prompt_token_ids=tracked.encoder_token_ids,
        )

    def forget(self, request: Request) -> None:
        """Stops following a request; an unknown one is ignored."""
        self._requests.pop(request.request_id, None)
        for sequence in request.sequences:
            self._sequences.pop(sequence.seq_id, None)

    def _record_prompt_logprobs(self, request: Request, part: PromptLogprobs) -> None:
        """Keeps one part by position. A prompt that is computed again after preemption gives equal
        parts."""
        prompt = request.prompt_token_ids
        prompt_logprobs = self._requests[request.request_id].prompt_logprobs
        if prompt_logprobs is None:  # they were reported
            return
        tokenizer = self._tokenizer_for(request)
        for position, logprobs in enumerate(part.entries, start=part.first_position):
            prompt_logprobs[position] = as_logprobs(prompt[position], logprobs, tokenizer)

    def _take_token(
        self, tracked: _TrackedSequence, place: int, output: StepOutput, num_before: int
    ) -> SequenceStatus | None:
        """Adds the token to log probabilities and text; returns how the sequence ends, None if it
        goes on.

        Args:
            num_before: tokens that the step has given the sequence before this one.
        """
        token_id = output.token_ids[place]
        logprobs = output.logprobs.get(place)
        if logprobs is None:
            tracked.cumulative_logprob += output.chosen_logprobs[place]
        else:
            tracked.cumulative_logprob += logprobs.logprob
            if tracked.logprobs is not None:
                tokenizer = self._tokenizer_for(tracked.request)
                tracked.logprobs.append(as_logprobs(token_id, logprobs, tokenizer))
        status = self._decide_end(tracked, token_id, num_before)
        if status is not None and tracked.detokenizer is not None:
            tracked.detokenizer.finish()
        return status

    def _decide_end(
        self, tracked: _TrackedSequence, token_id: int, num_before: int
    ) -> SequenceStatus | None:
        """Extends the text by one token; returns how the sequence ends, None if it goes on.

        In this order: end tokens and stop tokens, stop strings, length.
        """
        sequence, request, detokenizer = tracked.sequence, tracked.request, tracked.detokenizer
        params = request.sampling_params
        num_tokens = len(sequence.token_ids) + num_before + 1
        num_output = num_tokens - sequence.num_prompt_tokens
        # Before min_tokens an end token is sampled only where a grammar allows no other.
        if token_id in request.end_token_ids and (
            num_output >= params.min_tokens or params.structured_outputs is not None
        ):
            tracked.stop_reason = stop_token(token_id, request, self.tokenizer)
            if params.include_stop_str_in_output and detokenizer is not None:
                detokenizer.append(token_id)
            return SequenceStatus.FINISHED_STOPPED
        if detokenizer is not None:
            stop = detokenizer.append(token_id)
            if stop is not None:
                tracked.stop_reason = stop
                return SequenceStatus.FINISHED_STOPPED
        if num_tokens >= sequence.max_num_tokens:
            return SequenceStatus.FINISHED_LENGTH
        return None

    def _is_due(self, tracked: _TrackedSequence, num_before: int) -> bool:
        """Whether the sequence's present token is reported before its end."""
        if tracked.request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
            return False
        num_new = tracked.sequence.num_output_tokens + num_before + 1 - tracked.num_reported
        return not tracked.num_reported or num_new >= self._stream_interval

    def _advance_beams(
        self, tracked: _TrackedRequest, group: list[Sampled], decisions: StepDecisions
    ) -> None:
        assert tracked.beams is not None
        try:
            tracked.beams.advance(group, decisions)
        except Exception as error:
            _fail(tracked.request, error, decisions)
        decisions.to_report[tracked.request.request_id] = tracked.request

    def _tokenizer_for(self, request: Request) -> Tokenizer | None:
        """The tokenizer; None: the request wants no text."""
        return self.tokenizer if request.sampling_params.detokenize else None

    def _make_detokenizer(self, request: Request) -> Detokenizer | None:
        tokenizer = self._tokenizer_for(request)
        if tokenizer is None:
            return None
        return Detokenizer(tokenizer, request.prompt_token_ids, request.sampling_params)

    def _finish_texts(self, tracked: _TrackedRequest) -> None:
        """Releases the text that sequences still hold back."""
        for sequence in tracked.sequences:
            if sequence.detokenizer is not None:
                try:
                    sequence.detokenizer.finish()
                except Exception as error:
                    tracked.failure = _for_user(error, tracked.request)

    def _completions(self, tracked: _TrackedRequest) -> list[CompletionOutput]:
        """The request's outputs; those of a ranked request best first, numbered by rank."""
        params = tracked.request.sampling_params
        if tracked.beams is not None:
            outputs = tracked.beams.best()
            for output in outputs:
                self._add_beam_text(output, tracked)
        elif params.is_ranked:
            best = sorted(tracked.sequences, key=attrgetter("cumulative_logprob"), reverse=True)
            outputs = [_completion(known) for known in best[: params.n]]
        elif params.output_kind is RequestOutputKind.DELTA:
            return [_completion(known, True) for known in tracked.sequences if known.has_news()]
        else:
            return [_completion(sequence) for sequence in tracked.sequences]
        for rank, output in enumerate(outputs):
            output.index = rank
        return outputs

    def _add_beam_text(self, output: CompletionOutput, tracked: _TrackedRequest) -> None:
        """Beams change places often, so their text is made once, at the end."""
        request, token_ids = tracked.request, output.token_ids
        shows_end = request.sampling_params.include_stop_str_in_output
        if output.finish_reason == "stop" and not shows_end:
            token_ids = token_ids[:-1]
        detokenizer = self._make_detokenizer(request)
        if detokenizer is None:
            return
        try:
            for token_id in token_ids:
                detokenizer.append(token_id)
            detokenizer.finish()
        except Exception as error:  # the user still gets the tokens
            tracked.failure = _for_user(error, request)
        output.text = detokenizer.text


def _completion(tracked: _TrackedSequence, is_delta: bool = False) -> CompletionOutput:
    """All output of a sequence, or what is new of it."""
    sequence, detokenizer, logprobs = tracked.sequence, tracked.detokenizer, tracked.logprobs
    first, text = tracked.num_reported if is_delta else 0, ""
    if detokenizer is not None:
        text = detokenizer.take_delta() if is_delta else detokenizer.text
    reason = sequence.status.finish_reason
    tracked.num_reported = sequence.num_output_tokens
    tracked.is_end_reported = reason is not None
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + first :]),
        cumulative_logprob=tracked.cumulative_logprob,
        logprobs=None if logprobs is None else logprobs[first:],
        finish_reason=reason,
        stop_reason=tracked.stop_reason,
    )


def _fail(request: Request, error: Exception, decisions: StepDecisions) -> None:
    decisions.failed.setdefault(request.request_id, _for_user(error, request))
    decisions.to_report[request.request_id] = request


def _for_user(error: Exception, request: Request) -> RequestError:
    if isinstance(error, RequestError):  # its message is written for the user
        return error.with_traceback(None)
    logger.exception("request %s failed while its output was processed", request.request_id)
    text = f"request {request.request_id!r} failed: {type(error).__name__}: {error}"
    return RequestFailedError(text)


def _of_row(error: RowError) -> RequestError:
    if error.field is None:
        return RequestFailedError(error.text)
    return InvalidSamplingParamsError(error.text, field=error.field)
