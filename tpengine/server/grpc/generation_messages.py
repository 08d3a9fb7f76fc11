"""Conversion between the protocol's messages and the engine's requests and outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tpengine import errors
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import PoolingParams
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.parameter_fields import entries_of, read_fields, read_parameters
from tpengine.sampling_params import RequestOutputKind as Kind
from tpengine.sampling_params import SamplingParams
from tpengine.server import limits as bounds
from tpengine.server.kept_streams import KeptStreams, Resumption
from tpengine.server.limits import Limits
from tpengine.server.stream_sender import CandidateTurns, Positions, of_output, of_prompt

Message = pb.GenerateRequest
Response = pb.GenerateResponse
Defaults = Mapping[str, Any]


def read_generate_request(
    message: Message, kind: Kind, limits: Limits, max_model_len: int, defaults: Defaults
) -> GenerateRequest:
    """The engine's form of a message; id, owner and deadline, which belong to the call, are unset.

    Args:
        defaults: sampling parameters that the message leaves out.

    Raises:
        RequestError: a field is out of its bounds.
    """
    own = _read_common(message, limits)
    field = message.WhichOneof("input")
    _check_lengths(message.sampling, limits)
    params = read_sampling_params(message.sampling, kind, defaults)
    token_ids = None
    if field == "prompt_token_ids":
        token_ids = bounds.last_ids(message.prompt_token_ids.ids, params.truncate_prompt_tokens)
    prompt: Any = message.prompt if field == "prompt" else None
    bounds.check_sampling(
        params, limits, max_model_len, [prompt if token_ids is None else token_ids]
    )
    if message.images:
        if field == "messages":
            text = "go with prompt or prompt_token_ids; with messages put them into their parts"
            raise errors.InvalidPromptError.of_field("images", text)
        prompt = {"prompt": prompt, "multi_modal_data": {"image": list(message.images)}}
    return GenerateRequest(prompt, token_ids, params=params, **own)


def read_embed_request(message: pb.EmbedRequest, limits: Limits) -> GenerateRequest:
    """The same of a request to a model that makes no tokens.

    Raises:
        RequestError: a field is out of its bounds.
    """
    own, field = _read_common(message, limits), message.WhichOneof("input")
    return GenerateRequest(
        message.prompt if field == "prompt" else None,
        list(message.prompt_token_ids.ids) if field == "prompt_token_ids" else None,
        pooling_params=PoolingParams(**read_fields(message.pooling)),
        second=message.second if message.HasField("second") else None,
        **own,
    )


def _read_common(message: Message | pb.EmbedRequest, limits: Limits) -> dict[str, Any]:
    """What is the same in both kinds of requests, but for the forms of a prompt that is not made of
    messages.

    Raises:
        RequestError: a field is out of its bounds, or there is no prompt.
    """
    field = message.WhichOneof("input")
    if field is None:
        text = "a request needs prompt, prompt_token_ids or messages; got none of them"
        raise errors.InvalidPromptError(text)
    max_queue_s = None
    if message.HasField("max_queue_ms"):
        max_queue_s = read_seconds("max_queue_ms", message.max_queue_ms)
    return {
        "messages": read_conversation(message.messages, limits) if field == "messages" else None,
        "chat_options": {"add_generation_prompt": adds_prompt(message.messages)},
        "priority": message.priority,
        "max_queue_s": max_queue_s,
    }


def read_resumption(
    message: Message, account: str, kept: KeptStreams, kind: Kind
) -> Resumption | None:
    """What a call asks of kept streams; None: nothing, or the server keeps none.

    Args:
        account: of the client.
        kind: of the answer; one of another kind is another stream.

    Raises:
        RequestError: a field cannot be used.
    """
    window_s = kept.granted_s("resume_window_s", message.resume_window_s)
    if message.resume_from < 0:
        text = f"must be at least 0, got {message.resume_from}"
        raise errors.InvalidPromptError.of_field("resume_from", text)
    if not window_s and not message.resume_from:
        return None
    if not message.HasField("request_id"):
        text = "is missing; resume_window_s and resume_from need the client's own"
        raise errors.InvalidPromptError.of_field("request_id", text)
    bounds.check_request_id(message.request_id)
    plain = Message()
    plain.CopyFrom(message)
    plain.ClearField("resume_window_s")
    plain.ClearField("resume_from")
    request = kind.name.encode() + plain.SerializeToString(deterministic=True)
    digest = hashlib.sha256(request).digest()
    return Resumption(account, f"gRPC {message.request_id}", digest, window_s, message.resume_from)


def _check_lengths(sampling: pb.SamplingParams, limits: Limits) -> None:
    """Bounds the lists before they are copied: a message has room for millions of entries."""
    for name, bound in limits.max_entries().items():
        count = len(entries_of(getattr(sampling, name)))
        bounds.at_most(f"the number of entries of {name}", count, bound, name)
    for word in sampling.bad_words_token_ids:
        name = "bad_words_token_ids"
        bounds.at_most(f"the ids of one of {name}", len(word.ids), limits.max_stop_bytes, name)


def read_conversation(message: pb.Conversation, limits: Limits) -> list[dict[str, Any]]:
    """Messages for the chat template; a field that is not set has no entry.

    Raises:
        InvalidPromptError: there are too many, a role is too long, or a message has content and
            parts.
    """
    roles = (turn.role for turn in message.messages)
    bounds.check_conversation(roles, len(message.messages), limits)
    return list(map(_read_turn, message.messages))


def _read_turn(turn: pb.Message) -> dict[str, Any]:
    fields = {field.name: value for field, value in turn.ListFields()}
    if "parts" not in fields:
        return fields
    if "content" in fields:
        text = "a message in messages has content and parts; give one of them"
        raise errors.InvalidPromptError(text, field="messages")
    return {"content": list(map(_read_part, fields.pop("parts"))), **fields}


def _read_part(part: pb.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof("part") or "unknown"
    return {"type": kind, kind: getattr(part, kind, None)}


def adds_prompt(conversation: pb.Conversation) -> bool:
    """Whether a prompt ends with the opening of the assistant's answer; the default is yes."""
    return conversation.add_generation_prompt or not conversation.HasField("add_generation_prompt")


def read_seconds(name: str, milliseconds: int) -> float:
    """A field of milliseconds in seconds.

    Raises:
        InvalidPromptError: it is negative.
    """
    if milliseconds < 0:
        raise errors.InvalidPromptError.of_field(name, f"must be at least 0, got {milliseconds}")
    return milliseconds / 1e3


def read_sampling_params(
    message: pb.SamplingParams, kind: Kind, defaults: Defaults
) -> SamplingParams:
    """`SamplingParams` of the fields that are set, explicit zeros included, and of `defaults`.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """
    defaults = {} if message.use_beam_search else defaults  # it does not sample
    return SamplingParams(**{**defaults, **read_parameters(message)}, output_kind=kind)


class ResponseWriter:
    """Makes the messages of one request: one, or those of a stream."""

    def __init__(self) -> None:
        self._turns = CandidateTurns()
        self._tokens: Response | None = None

    def write_tokens(self, output: RequestOutput) -> Response:
        """The message of a delta that `has_only_tokens`, in a third of the time of `write`. The
        next call changes this message: serialize it first."""
        if self._tokens is None:
            self._tokens = Response(request_id=output.request_id, finished=False)
            self._tokens.outputs.add()
        completion, written = output.outputs[0], self._tokens.outputs[0]
        written.index = completion.index
        written.text = completion.text
        written.token_ids[:] = completion.token_ids
        return self._tokens

    async def write(self, output: RequestOutput) -> Response:
        """The message of an output: all of the answer, or what is new of it.

        Yields to the event loop while it converts an output with many candidates.
        """
        message = Response(request_id=output.request_id, finished=output.finished)
        for completion in output.outputs:
            written = _write_completion(message, completion)
            await self._add_logprobs(written.logprobs, of_output(completion))
        if output.finished:
            message.usage.CopyFrom(_write_usage(output))
        await self._add_logprobs(message.prompt_logprobs, of_prompt(output))
        return message

    async def _add_logprobs(self, written: Any, positions: Positions) -> None:
        async for token_id, candidates in self._turns.take(positions):
            written.append(_write_logprobs(token_id, candidates))


def _write_completion(message: Response, output: CompletionOutput) -> pb.CompletionOutput:
    """Adds a completion without its log probabilities."""
    total = output.cumulative_logprob
    completion = message.outputs.add(
        index=output.index, text=output.text, token_ids=output.token_ids, cumulative_logprob=total
    )
    if output.finish_reason is not None:
        completion.finish_reason = getattr(pb, f"FINISH_REASON_{output.finish_reason.upper()}")
        if isinstance(output.stop_reason, str):
            completion.matched_stop_string = output.stop_reason
        elif output.stop_reason is not None:
            completion.matched_stop_token_id = output.stop_reason
    return completion


def _write_logprobs(token_id: int, candidates: Mapping[int, Logprob]) -> pb.TokenLogprobs:
    """The candidates of one position, the chosen token first, then by rank."""

    def place(item: tuple[int, Logprob]) -> tuple[bool, int]:
        return item[0] != token_id, item[1].rank or 0

    message = pb.TokenLogprobs()
    for candidate, entry in sorted(candidates.items(), key=place):
        text = entry.decoded_token
        message.candidates.add(
            token_id=candidate, logprob=entry.logprob, rank=entry.rank, decoded_token=text
        )
    return message


def write_embed_response(output: RequestOutput) -> pb.EmbedResponse:
    """The answer of a model that makes no tokens."""
    usage = _write_usage(output)
    return pb.EmbedResponse(request_id=output.request_id, values=output.pooled, usage=usage)


def _write_usage(output: RequestOutput) -> pb.Usage:
    usage = pb.Usage(num_prompt_tokens=output.num_prompt_tokens)
    usage.num_output_tokens = output.num_output_tokens
    usage.num_cached_tokens = output.num_cached_tokens
    if (moments := output.metrics) is not None:
        usage.num_preemptions = moments.num_preemptions
        ends = (moments.first_scheduled_time, moments.first_token_time, moments.finished_time)
        for name, moment in zip(("queue_s", "first_token_s", "total_s"), ends, strict=True):
            if moment is not None:
                setattr(usage, name, moment - moments.arrival_time)
    return usage
