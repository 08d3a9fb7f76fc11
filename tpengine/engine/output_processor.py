"""From sampled ids to what a user sees: text, the decision to stop, `RequestOutput`.

This is the only place where a sequence is found to be complete.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tpengine.engine.detokenizer import Detokenizer
from tpengine.engine.tokenizer import Tokenizer
from tpengine.messages import StepOutput, TokenLogprobs
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.sampling_params import RequestOutputKind
from tpengine.scheduling.step import SchedulerOutput
from tpengine.sequence import Request, Sequence, SequenceStatus


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


class OutputProcessor:
    """Follows the output of every request from `add` until it is finished.

    Args:
        tokenizer: None: outputs have ids and no text.
        max_model_len: a sequence of this many tokens ends for its length.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._tracked: dict[int, _Tracked] = {}

    def add(self, request: Request) -> None:
        """Starts following a request."""
        params = request.sampling_params
        for sequence in request.sequences:
            detokenizer = None
            if self.tokenizer is not None and params.detokenize:
                detokenizer = Detokenizer(
                    self.tokenizer,
                    request.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=params.stop,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
            if params.logprobs is not None:
                sequence.logprobs = []
            max_num_tokens = self._max_model_len
            if params.max_tokens is not None:
                wanted = sequence.num_prompt_tokens + params.max_tokens
                max_num_tokens = min(max_num_tokens, wanted)
            self._tracked[sequence.seq_id] = _Tracked(
                request, sequence, detokenizer, max_num_tokens
            )

    def process(self, scheduled: SchedulerOutput, output: StepOutput) -> list[RequestOutput]:
        """Appends the step's tokens to their sequences, finishes those that are complete, and
        reports every request that got a token, or was ignored, as its `output_kind` asks."""
        touched: dict[str, Request] = {}
        for i, (sequence, token_id) in enumerate(
            zip(scheduled.sampled, output.token_ids, strict=True)
        ):
            tracked = self._tracked.get(sequence.seq_id)
            if tracked is None:  # aborted while the step was computed
                continue
            sequence.token_ids.append(token_id)
            if sequence.logprobs is not None:
                self._append_logprobs(sequence, token_id, output.logprobs[i])
            status = self._advance(tracked, token_id)
            if status is not None:
                sequence.move_to(status)
                if tracked.detokenizer is not None:
                    tracked.detokenizer.finish()
            request = tracked.request
            if status is not None or (
                request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
            ):
                touched[request.request_id] = request
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = time.monotonic()
        return self._report(touched.values()) + self.finish(scheduled.ignored)

    def finish(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Reports requests that others ended: aborted or ignored ones."""
        requests = list(requests)
        for request in requests:
            for sequence in request.sequences:
                tracked = self._tracked.get(sequence.seq_id)
                if tracked is not None and tracked.detokenizer is not None:
                    tracked.detokenizer.finish()
        return self._report(requests)

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

    def _append_logprobs(self, sequence: Sequence, token_id: int, found: TokenLogprobs) -> None:
        assert sequence.logprobs is not None
        entries = {
            candidate: Logprob(logprob, rank, self._token_text(candidate))
            for rank, (candidate, logprob) in enumerate(
                zip(found.top_token_ids, found.top_logprobs, strict=True), start=1
            )
        }
        entries.setdefault(token_id, Logprob(found.logprob, found.rank, self._token_text(token_id)))
        sequence.logprobs.append(entries)
        sequence.cumulative_logprob += found.logprob

    def _token_text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)

    def _report(self, requests: Iterable[Request]) -> list[RequestOutput]:
        now = time.monotonic()
        outputs = []
        for request in requests:
            finished = request.finished
            kind = request.sampling_params.output_kind
            if kind is RequestOutputKind.FINAL_ONLY and not finished:
                continue
            if finished:
                request.metrics.finished_time = now
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    prompt=request.prompt,
                    prompt_token_ids=request.prompt_token_ids,
                    outputs=[self._completion(s, kind) for s in request.sequences],
                    finished=finished,
                    metrics=request.metrics,
                    error=request.error,
                )
            )
            if finished:
                for sequence in request.sequences:
                    self._tracked.pop(sequence.seq_id, None)
        return outputs

    def _completion(self, sequence: Sequence, kind: RequestOutputKind) -> CompletionOutput:
        tracked = self._tracked[sequence.seq_id]
        detokenizer = tracked.detokenizer
        first = 0
        if kind is RequestOutputKind.DELTA:
            first = tracked.num_reported
            text = "" if detokenizer is None else detokenizer.take_delta()
        else:
            text = "" if detokenizer is None else detokenizer.text
        tracked.num_reported = sequence.num_output_tokens
        logprobs = sequence.logprobs
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=sequence.token_ids[sequence.num_prompt_tokens + first :],
            cumulative_logprob=None if logprobs is None else sequence.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[first:],
            finish_reason=sequence.status.finish_reason,
            stop_reason=sequence.stop_reason,
        )
