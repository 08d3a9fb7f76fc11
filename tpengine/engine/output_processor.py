"""From sampled ids to what a user sees: text, the decision to stop, `RequestOutput`.

This is the only place where a sequence is found to be complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tpengine.engine.beam_search import BeamSearch, CompleteBeam, Sampled
from tpengine.engine.detokenizer import Detokenizer
from tpengine.engine.prompt_logprobs import PromptLogprobsCollector, as_logprobs
from tpengine.engine.stats import EngineCounters
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import RequestError
from tpengine.logger import init_logger
from tpengine.messages import StepOutput
from tpengine.outputs import CompletionOutput, RequestOutput
from tpengine.sampling_params import RequestOutputKind
from tpengine.scheduling.step import SchedulerOutput
from tpengine.sequence import Request, Sequence, SequenceStatus

logger = init_logger(__name__)

FailRequest = Callable[[str, str], Request | None]
"""Ends the request of an id for a reason; None if it has ended already."""


class _Tracked:
    """One sequence while its request runs, with what only this module needs of it."""

    __slots__ = ("detokenizer", "max_num_tokens", "num_reported", "request", "sequence")

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        detokenizer: Detokenizer | None,
        max_num_tokens: int,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.detokenizer = detokenizer
        self.max_num_tokens = max_num_tokens
        self.num_reported = 0

    def is_due(self, stream_interval: int) -> bool:
        num_new = self.sequence.num_output_tokens - self.num_reported
        return not self.num_reported or num_new >= stream_interval


class OutputProcessor:
    """Follows the output of every request from `add` until it is finished.

    Args:
        tokenizer: None: outputs have ids and no text.
        max_model_len: a sequence of this many tokens ends for its length.
        fail_request: called for a request that cannot go on; the others do.
        figures: where tokens and ends of requests are counted.
        stream_interval: tokens that are reported together, after the first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        fail_request: FailRequest,
        figures: EngineCounters | None = None,
        stream_interval: int = 1,
    ) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._fail_request = fail_request
        self._figures = EngineCounters() if figures is None else figures
        self._stream_interval = stream_interval
        self._tracked: dict[int, _Tracked] = {}
        self._beams: dict[str, BeamSearch] = {}
        self._prompt_logprobs = PromptLogprobsCollector()

    def add(self, request: Request) -> None:
        """Starts following a request."""
        params = request.sampling_params
        num_prompt_tokens = len(request.prompt_token_ids)
        max_num_tokens = self._max_model_len
        if params.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, num_prompt_tokens + params.max_tokens)
        for sequence in request.sequences:
            # Beams change places all the time: their text is made when they are complete.
            detokenizer = None if params.use_beam_search else self._detokenizer(request)
            if params.logprobs is not None:
                sequence.logprobs = []
            self._tracked[sequence.seq_id] = _Tracked(
                request, sequence, detokenizer, max_num_tokens
            )
        if params.use_beam_search:
            beams = BeamSearch(request, max_num_tokens, self.tokenizer)
            self._beams[request.request_id] = beams

    def process(self, scheduled: SchedulerOutput, output: StepOutput) -> list[RequestOutput]:
        """Appends the step's tokens to their sequences, finishes those that are complete, and
        reports every request that got a token, or was ignored, as its `output_kind` asks.

        What goes wrong with one request ends that request alone. What the driver decides about
        beams is left in `scheduled.decisions`."""
        touched: dict[str, Request] = {}
        failed: list[Request] = []
        beams: dict[str, list[Sampled]] = {}
        now = time.time()
        for row, part in output.prompt_logprobs.items():
            tracked = self._tracked.get(scheduled.rows[row].seq_id)
            if tracked is None:
                continue
            try:
                self._prompt_logprobs.record(tracked.request, part, self.tokenizer)
            except Exception as error:
                self._fail(tracked.request, _reason(error, tracked.request), failed)
        for place, sequence in enumerate(scheduled.sampled):
            tracked = self._tracked.get(sequence.seq_id)
            if tracked is None or sequence.status.finished:  # ended while the step was computed
                continue
            request = tracked.request
            if place in output.errors:
                self._fail(request, output.errors[place], failed)
                continue
            self._figures.record_token(request, now)
            if request.sampling_params.use_beam_search:
                told = output.logprobs.get(place)
                sampled = (sequence, output.candidates[place], told)
                beams.setdefault(request.request_id, []).append(sampled)
                continue
            try:
                status = self._append(tracked, place, output)
            except Exception as error:
                self._fail(request, _reason(error, request), failed)
                continue
            is_streamed = request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
            if status is not None or (is_streamed and tracked.is_due(self._stream_interval)):
                touched[request.request_id] = request
        for request_id, group in beams.items():
            request = self._tracked[group[0][0].seq_id].request
            if not request.finished:
                self._advance_beams(request, group, scheduled, failed)
                touched[request_id] = request
        touched = {k: r for k, r in touched.items() if r not in failed}
        return self._report(touched.values()) + self.finish([*failed, *scheduled.ignored])

    def finish(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Reports requests that others ended: aborted, ignored or failed ones.

        What is still held back of a text and cannot be decoded is left out, with an error."""
        requests = list(requests)
        for request in requests:
            for sequence in request.sequences:
                tracked = self._tracked.get(sequence.seq_id)
                if tracked is None or tracked.detokenizer is None:
                    continue
                try:
                    tracked.detokenizer.finish()
                except Exception as error:
                    request.error = request.error or _reason(error, request)
        return self._report(requests)

    def _fail(self, request: Request, reason: str, failed: list[Request]) -> None:
        if self._fail_request(request.request_id, reason) is not None:
            failed.append(request)

    def _advance_beams(
        self,
        request: Request,
        group: list[Sampled],
        scheduled: SchedulerOutput,
        failed: list[Request],
    ) -> None:
        try:
            decisions = self._beams[request.request_id].advance(group)
        except Exception as error:
            self._fail(request, _reason(error, request), failed)
            return
        scheduled.decisions.forks += decisions.forks
        scheduled.decisions.overridden += decisions.overridden

    def _append(self, tracked: _Tracked, place: int, output: StepOutput) -> SequenceStatus | None:
        """Appends a sequence's token; returns how it ended, None if it goes on."""
        sequence, token_id = tracked.sequence, output.token_ids[place]
        sequence.token_ids.append(token_id)
        found = output.logprobs.get(place)
        if found is not None:
            sequence.cumulative_logprob += found.logprob
            if sequence.logprobs is not None:
                sequence.logprobs.append(as_logprobs(token_id, found, self.tokenizer))
        status = self._advance(tracked, token_id)
        if status is not None:
            if tracked.detokenizer is not None:  # first, for what has finished cannot fail
                tracked.detokenizer.finish()
            sequence.move_to(status)
        return status

    def _advance(self, tracked: _Tracked, token_id: int) -> SequenceStatus | None:
        """Extends the text by one token; returns how the sequence ended, None if it goes on."""
        sequence, request = tracked.sequence, tracked.request
        params = request.sampling_params
        num_tokens = len(sequence.token_ids)
        if (
            token_id in request.end_token_ids
            and num_tokens - sequence.num_prompt_tokens >= params.min_tokens
        ):
            if token_id in params.stop_token_ids:
                sequence.stop_reason = token_id
            if params.include_stop_str_in_output and tracked.detokenizer is not None:
                tracked.detokenizer.append(token_id)
            return SequenceStatus.FINISHED_STOPPED
        if tracked.detokenizer is not None:
            stop = tracked.detokenizer.append(token_id)
            if stop is not None:
                sequence.stop_reason = stop
                return SequenceStatus.FINISHED_STOPPED
        if num_tokens >= tracked.max_num_tokens:
            return SequenceStatus.FINISHED_LENGTH
        return None

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        params = request.sampling_params
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _text(self, request: Request, token_ids: list[int]) -> str:
        """The text of a whole output, for beams, which are not followed token by token."""
        detokenizer = self._detokenizer(request)
        if detokenizer is None:
            return ""
        try:
            for token_id in token_ids:
                detokenizer.append(token_id)
            detokenizer.finish()
        except Exception as error:  # its tokens are still worth having, and the others go on
            request.error = _reason(error, request)
        return detokenizer.text

    def _report(self, requests: Iterable[Request]) -> list[RequestOutput]:
        now = time.time()
        outputs = []
        for request in requests:
            finished, params = request.finished, request.sampling_params
            is_final = params.output_kind is RequestOutputKind.FINAL_ONLY or params.is_ranked
            if is_final and not finished:
                continue
            if finished:
                self._figures.record_end(request, now)
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=request.prompt,
                    prompt_token_ids=request.prompt_token_ids.copy(),
                    outputs=self._completions(request),
                    finished=finished,
                    metrics=request.metrics,
                    error=request.error,
                    prompt_logprobs=self._prompt_logprobs.of(request),
                    num_cached_tokens=request.metrics.num_cached_tokens,
                )
            )
            if finished:
                self.forget(request)
        return outputs

    def forget(self, request: Request) -> None:
        """Stops following a request."""
        for sequence in request.sequences:
            self._tracked.pop(sequence.seq_id, None)
        self._beams.pop(request.request_id, None)
        self._prompt_logprobs.forget(request.request_id)

    def _completions(self, request: Request) -> list[CompletionOutput]:
        """The request's outputs; those of a ranked one best first, numbered by their rank."""
        params = request.sampling_params
        if not params.is_ranked:
            return [self._completion(s, params.output_kind) for s in request.sequences]
        beams = self._beams.get(request.request_id)
        stopped = SequenceStatus.FINISHED_STOPPED
        # One that was ended from outside shows how far its live beams came.
        if beams is not None and all(s.status is stopped for s in request.sequences):
            return [
                self._beam_completion(request, index, beam)
                for index, beam in enumerate(beams.complete[: params.n])
            ]
        ranked = sorted(request.sequences, key=lambda s: -s.cumulative_logprob)
        outputs = [self._completion(s, RequestOutputKind.FINAL_ONLY) for s in ranked[: params.n]]
        for index, (sequence, output) in enumerate(zip(ranked, outputs, strict=False)):
            output.index = index
            if beams is not None:
                output.text = self._text(request, sequence.output_token_ids)
                output.finish_reason = request.finish_reason
        return outputs

    def _completion(self, sequence: Sequence, kind: RequestOutputKind) -> CompletionOutput:
        tracked = self._tracked[sequence.seq_id]
        params = tracked.request.sampling_params
        detokenizer = tracked.detokenizer
        first = 0
        if kind is RequestOutputKind.DELTA:
            first = tracked.num_reported
            text = "" if detokenizer is None else detokenizer.take_delta()
        else:
            text = "" if detokenizer is None else detokenizer.text
        tracked.num_reported = sequence.num_output_tokens
        logprobs = sequence.logprobs
        has_total = logprobs is not None or params.is_ranked
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + first :],
            cumulative_logprob=sequence.cumulative_logprob if has_total else None,
            logprobs=None if logprobs is None else logprobs[first:],
            finish_reason=sequence.status.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _beam_completion(
        self, request: Request, index: int, beam: CompleteBeam
    ) -> CompletionOutput:
        token_ids = beam.output_token_ids
        ended = beam.status is SequenceStatus.FINISHED_STOPPED
        if ended and not request.sampling_params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return CompletionOutput(
            index=index,
            text=self._text(request, token_ids),
            token_ids=beam.output_token_ids,
            cumulative_logprob=beam.cumulative_logprob,
            logprobs=beam.logprobs,
            finish_reason=beam.status.finish_reason,
            stop_reason=beam.stop_reason,
        )


def _reason(error: Exception, request: Request) -> str:
    if isinstance(error, RequestError):  # its message is made for the user
        return str(error)
    logger.exception("request %s failed while its output was processed", request.request_id)
    return f"request {request.request_id!r} failed: {type(error).__name__}: {error}"
