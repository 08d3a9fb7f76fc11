"""From the engine's outputs to the protocol's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.server.grpc.proto import tpengine_pb2 as pb

_CANDIDATES_A_TURN = 1024
"""Candidates that are written, in some milliseconds, before the event loop's other work goes on."""
_FINISH_REASONS: Mapping[str, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "ignored": pb.FINISH_REASON_IGNORED,
    "error": pb.FINISH_REASON_ERROR,
}


class ResponseWriter:
    """Makes the messages of one answer, whether there is one or many."""

    def __init__(self) -> None:
        self._num_output_tokens = 0
        self._prompt_told = 0
        self._num_candidates = 0
        self._ended: set[int] = set()
        self._delta: pb.GenerateResponse | None = None

    def write_delta(self, output: RequestOutput) -> bytes | None:
        """The message of an output that has nothing but new tokens of its only sequence, as nearly
        all of a stream have, in a third of the time; None: it has more, and `write` is to be used.
        """
        if output.finished or len(output.outputs) != 1 or output.prompt_logprobs is not None:
            return None
        one = output.outputs[0]
        if not one.token_ids or one.finish_reason is not None or one.logprobs is not None:
            return None
        self._num_output_tokens += len(one.token_ids)
        if self._delta is None:
            self._delta = pb.GenerateResponse(request_id=output.request_id, finished=False)
            self._delta.outputs.add()
        completion = self._delta.outputs[0]
        completion.index = one.index
        completion.text = one.text
        completion.token_ids[:] = one.token_ids
        return self._delta.SerializeToString()

    async def write(self, output: RequestOutput) -> pb.GenerateResponse:
        """One message: all of the answer, or what is new of it.

        Other calls go on while one with many candidates is written.
        """
        message = pb.GenerateResponse(request_id=output.request_id, finished=output.finished)
        ended = self._ended
        for one in output.outputs:
            self._num_output_tokens += len(one.token_ids)
            # The engine reports all sequences of a request, those too that ended long ago.
            if one.index in ended or not (one.token_ids or one.text or one.finished()):
                continue
            if one.finished():
                ended.add(one.index)
            completion = _write_completion(message, one)
            if one.logprobs:
                await self._add_logprobs(completion.logprobs, one.token_ids, one.logprobs)
        if output.finished:
            message.usage.CopyFrom(_write_usage(output, self._num_output_tokens))
        if output.prompt_logprobs and not self._prompt_told:
            # The engine reports them with every output from the first on.
            self._prompt_told = len(output.prompt_logprobs)
            await self._add_logprobs(
                message.prompt_logprobs, output.prompt_token_ids, output.prompt_logprobs
            )
        return message

    async def _add_logprobs(
        self,
        written: Any,
        token_ids: Sequence[int],
        logprobs: Sequence[Mapping[int, Logprob] | None],
    ) -> None:
        for token_id, candidates in zip(token_ids, logprobs, strict=False):
            written.append(_write_logprobs(token_id, candidates or {}))
            self._num_candidates += len(candidates or ())
            if self._num_candidates >= _CANDIDATES_A_TURN:
                self._num_candidates = 0
                await asyncio.sleep(0)


def _write_completion(
    message: pb.GenerateResponse, output: CompletionOutput
) -> pb.CompletionOutput:
    """Adds a completion without its log-probabilities."""
    completion = message.outputs.add(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        cumulative_logprob=output.cumulative_logprob,
    )
    if output.finish_reason is not None:
        completion.finish_reason = _FINISH_REASONS[output.finish_reason]
        if isinstance(output.stop_reason, str):
            completion.matched_stop_string = output.stop_reason
        elif output.stop_reason is not None:
            completion.matched_stop_token_id = output.stop_reason
    return completion


def _write_logprobs(token_id: int, candidates: Mapping[int, Logprob]) -> pb.TokenLogprobs:
    def place(item: tuple[int, Logprob]) -> tuple[bool, int]:
        return item[0] != token_id, item[1].rank or 0

    return pb.TokenLogprobs(
        candidates=[
            pb.Logprob(
                token_id=one_id,
                logprob=one.logprob,
                rank=one.rank,
                decoded_token=one.decoded_token,
            )
            for one_id, one in sorted(candidates.items(), key=place)
        ]
    )


def _write_usage(output: RequestOutput, num_output_tokens: int) -> pb.Usage:
    usage = pb.Usage(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
    )
    if (moments := output.metrics) is not None:
        usage.num_preemptions = moments.num_preemptions
        for name, moment in (
            ("queue_s", moments.first_scheduled_time),
            ("first_token_s", moments.first_token_time),
            ("total_s", moments.finished_time),
        ):
            if moment is not None:
                setattr(usage, name, moment - moments.arrival_time)
    return usage
