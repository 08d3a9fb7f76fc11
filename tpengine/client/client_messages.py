"""Conversion between the types of the package and the protocol's messages, in the client."""

from __future__ import annotations

import copy
import math
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, cast

from google.protobuf.descriptor import FieldDescriptor

from tpengine import errors
from tpengine.inputs import PoolingParams, TextPrompt, TokensPrompt
from tpengine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto.parameter_fields import write_parameters
from tpengine.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | TextPrompt | TokensPrompt
"""A text, token ids, a conversation of messages with `role` and `content`, or a dict with text or
ids as `LLM.generate` accepts it. Pictures are bytes of files."""
Sampling = SamplingParams | Mapping[str, Any]
"""All parameters, or a dict of some: for the others the server takes the model's defaults."""

_MOST_MS = 10**12 - 1
"""About thirty years; a server reads no more digits."""
_FINISH_REASONS = {
    number: name.removeprefix("FINISH_REASON_").lower()
    for name, number in pb.FinishReason.items()
    if number != pb.FINISH_REASON_UNSPECIFIED
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and times of a request, as the server counted them.

    Attributes:
        num_output_tokens: of all sequences.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
        queue_s, first_token_s, total_s: seconds from its arrival at the server to its first step,
            first token and end; None: it did not get there.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float | None


@dataclass(slots=True)
class RemoteOutput(RequestOutput):
    """A `RequestOutput` from a server; `prompt_token_ids` is empty if text or messages were sent.

    Attributes:
        usage: of the last output; None before it.
    """

    usage: Usage | None = None


@dataclass(kw_only=True)
class RemoteEmbedding(EmbeddingRequestOutput):
    """An `EmbeddingRequestOutput` from a server; `prompt_token_ids` is empty if text or messages
    were sent."""

    usage: Usage


class RequestFields(NamedTuple):
    """What every request may have; see `GenerationClient.generate`."""

    request_id: str | None = None
    priority: int = 0
    max_queue_s: float | None = None


def to_request(prompt: Prompt, params: Sampling | None, own: RequestFields) -> pb.GenerateRequest:
    """The message of a request.

    Raises:
        RequestError: a value does not fit into the protocol.
    """
    params = SamplingParams() if params is None else params
    request = pb.GenerateRequest(sampling=_to_sampling(params))
    _put_common(request, prompt, own)
    if isinstance(prompt, Mapping) and (data := prompt.get("multi_modal_data")):
        request.images.extend(_read_pictures(data))
    return request


def to_embed_request(
    prompt: Prompt, second: str | None, params: PoolingParams | None, own: RequestFields
) -> pb.EmbedRequest:
    """The message of a request to a model that makes no tokens.

    Raises:
        RequestError: a value does not fit into the protocol, or is out of its range.
    """
    params = PoolingParams() if params is None else params
    request = pb.EmbedRequest(second=None if second is None else _checked_text(second))
    fields = {name: getattr(params, name) for name in request.pooling.DESCRIPTOR.fields_by_name}
    put(request.pooling, errors.InvalidSamplingParamsError, **fields)
    _put_common(request, prompt, own)
    if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
        raise errors.InvalidPictureError("multi_modal_data is only for requests that generate")
    return request


def _put_common(request: Any, prompt: Prompt, own: RequestFields) -> None:
    """Sets the fields that both kinds of requests have.

    Raises:
        RequestError: a value does not fit into the protocol.
    """
    put(request, errors.InvalidPromptError, request_id=own.request_id)
    put(request, errors.InvalidPriorityError, priority=None if own.priority == 0 else own.priority)
    if own.max_queue_s is not None:
        max_queue_ms = to_milliseconds("max_queue_s", own.max_queue_s)
        if max_queue_ms is not None:
            request.max_queue_ms = max(0, max_queue_ms)
    text, rest = _unpack(prompt)
    if rest is None:
        request.prompt = _checked_text(text)
    elif _is_conversation(rest):
        request.messages.CopyFrom(to_conversation(cast(Sequence[Message], rest)))
    else:
        try:
            request.prompt_token_ids.ids.extend(cast(Sequence[int], rest))
        except (TypeError, ValueError, OverflowError) as error:
            must = "a prompt must be text, token ids below 2**31, or messages that are dicts"
            text = f"{must}; got {type(rest).__name__}: {error}"
            raise errors.InvalidPromptError(text) from error
        request.prompt_token_ids.SetInParent()  # an empty list must arrive as one


def put(message: Any, kind: type[errors.RequestError], **fields: object) -> Any:
    """Sets fields of a message; one that is None stays unset.

    Args:
        kind: class of the error.

    Raises:
        RequestError: a value does not fit into its field.
    """
    for name, value in fields.items():  # one by one: protobuf's text does not name the field
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            content = _CONTENTS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type, _WHOLE)
            text = f"{name} can hold only {content} in the protocol, got {reprlib.repr(value)}"
            raise kind(f"{text}: {error}", field=name) from error
    return message


_WHOLE = f"integers in [{-(2**31)}, {2**31 - 1}]"
_CONTENTS = {
    FieldDescriptor.CPPTYPE_STRING: "valid Unicode",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_DOUBLE: "numbers of 64 bits",
    FieldDescriptor.CPPTYPE_INT64: "integers of 64 bits",
}


def to_milliseconds(name: str, seconds: float) -> int | None:
    """Seconds in the protocol's unit; None: above its largest value, as infinity is.

    Raises:
        RequestError: it is not a number.
    """
    if not isinstance(seconds, Real) or not seconds <= math.inf:  # False for NaN
        text = f"must be a number of seconds, or math.inf for no limit; got {seconds!r}"
        raise errors.RequestError.of_field(name, text)
    most_s = _MOST_MS / 1e3
    return None if seconds > most_s else round(1000 * max(seconds, -most_s))


def _unpack(prompt: Prompt) -> tuple[str | None, Sequence[int] | Sequence[Message] | None]:
    """The text of a prompt, and its ids or messages; if both are given, ids are sent.

    Raises:
        InvalidPromptError: a dict has unknown keys, or neither text nor ids.
    """
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "multi_modal_data"}
    if unknown:
        got = sorted(map(str, unknown))
        problem = f"a prompt's keys are prompt, prompt_token_ids and multi_modal_data; got {got}"
        raise errors.InvalidPromptError(problem)
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise errors.InvalidPromptError("a request needs a prompt or prompt_token_ids; got neither")
    return cast("str | None", text), cast("Sequence[int] | None", token_ids)


def _is_conversation(rest: Sequence[int] | Sequence[Message]) -> bool:
    return isinstance(rest, Sequence) and len(rest) > 0 and isinstance(rest[0], Mapping)


def _read_pictures(data: object) -> Sequence[bytes]:
    """The files of the pictures of a prompt.

    Raises:
        InvalidPictureError: it is not `{"image": ...}` with the bytes of files.
    """
    match data:
        case {"image": bytes(image), **rest} if not rest:
            return [image]
        case {"image": [*images], **rest} if not rest and {*map(type, images)} <= {bytes}:
            return images
    text = "multi_modal_data must be {'image': ...} with the bytes of one file, or of several"
    raise errors.InvalidPictureError(f"{text}; got {reprlib.repr(data)}")


def to_conversation(messages: Sequence[Message]) -> pb.Conversation:
    """Messages with `role` and `content`: a text, or parts as `LLM.chat` takes them.

    Raises:
        InvalidPromptError: a message has another form.
    """
    conversation = pb.Conversation()
    if not isinstance(messages, Iterable):
        raise errors.InvalidPromptError(
            f"messages must be a list of dicts, got {type(messages).__name__}"
        )
    for message in messages:
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            text = "a message must be a dict with 'role' and 'content'"
            raise errors.InvalidPromptError(f"{text}, got {reprlib.repr(message)}")
        role, content = _checked_text(message["role"]), message["content"]
        if isinstance(content, list | tuple):
            conversation.messages.add(role=role, parts=list(map(_to_part, content)))
        else:
            conversation.messages.add(role=role, content=_checked_text(content))
    return conversation


def _to_part(part: Any) -> pb.ContentPart:
    match part:
        case {"type": "text", "text": text, **rest} if not rest:
            return pb.ContentPart(text=_checked_text(text))
        case {"type": "image", "image": bytes(image), **rest} if not rest:
            return pb.ContentPart(image=image)
        case {"type": "image_url", "image_url": {"url": url}, **rest} if not rest:
            return pb.ContentPart(image_url=_checked_text(url))
    text = "a part of a content must be a text, an image (bytes) or an image_url"
    raise errors.InvalidPromptError(f"{text}, got {reprlib.repr(part)}")


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        raise errors.InvalidPromptError(f"text must be a string, got {reprlib.repr(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidPromptError(f"the text is not valid Unicode: {error}") from error
    return text


def _to_sampling(original: Sampling) -> pb.SamplingParams:
    """All fields that have a value, so that the server's defaults do not matter; of a dict only its
    own.

    Raises:
        InvalidSamplingParamsError: a value was assigned that is out of its range, or does not fit
            into the protocol.
    """
    params = SamplingParams(**original) if isinstance(original, Mapping) else copy.copy(original)
    params.check()
    for name in ("logits_processors", "visible_token_ids"):
        if getattr(params, name):
            text = f"= {getattr(params, name)!r} is not in the protocol: it works offline only"
            raise errors.InvalidSamplingParamsError.of_field(name, text)
    fields = write_parameters(params)
    if isinstance(original, Mapping):
        fields = {name: fields[name] for name in fields.keys() & original.keys()}
    sampling = pb.SamplingParams()
    put(sampling, errors.InvalidSamplingParamsError, **fields)
    return sampling


def to_output(response: pb.GenerateResponse, prompt: Prompt) -> RemoteOutput:
    """The output of one answer, or of one message of a stream."""
    usage = _to_usage(response.usage) if response.HasField("usage") else None
    text, token_ids = _unpack(prompt)[0], _given_ids(prompt)
    logprobs = [_to_logprobs(entry) or None for entry in response.prompt_logprobs] or None
    outputs = list(map(_to_completion, response.outputs))
    prompt_parts = (response.request_id, text, token_ids, logprobs)
    answer = RemoteOutput(*prompt_parts, outputs, response.finished, _to_metrics(usage))
    if usage is not None:
        answer.usage, answer.num_cached_tokens = usage, usage.num_cached_tokens
        answer.num_output_tokens = usage.num_output_tokens
    return answer


def to_embedding(response: pb.EmbedResponse, prompt: Prompt) -> RemoteEmbedding:
    """The output of a model that makes no tokens."""
    usage, made = _to_usage(response.usage), EmbeddingOutput(list(response.values))
    answer = RemoteEmbedding(response.request_id, made, _given_ids(prompt), True, usage=usage)
    answer.num_cached_tokens = usage.num_cached_tokens
    return answer


def _given_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt that was given as ids; else none."""
    rest = _unpack(prompt)[1]
    is_ids = rest is not None and not _is_conversation(rest)
    return list(cast(Sequence[int], rest)) if is_ids else []


def _to_completion(output: pb.CompletionOutput) -> CompletionOutput:
    stop = output.WhichOneof("matched_stop")
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        cumulative_logprob=_optional(output, "cumulative_logprob"),
        logprobs=[_to_logprobs(entry) for entry in output.logprobs] or None,
        finish_reason=_FINISH_REASONS.get(output.finish_reason),
        stop_reason=None if stop is None else getattr(output, stop),
    )


def _to_logprobs(logprobs: pb.TokenLogprobs) -> dict[int, Logprob]:
    return {
        c.token_id: Logprob(c.logprob, _optional(c, "rank"), _optional(c, "decoded_token"))
        for c in logprobs.candidates
    }


def _to_usage(usage: pb.Usage) -> Usage:
    values = {field.name: getattr(usage, field.name) for field in usage.DESCRIPTOR.fields}
    times = {name: _optional(usage, name) for name in ("queue_s", "first_token_s", "total_s")}
    return Usage(**values | times)


def _to_metrics(usage: Usage | None) -> RequestMetrics | None:
    """The server's durations as moments of this machine's clock, the end being now."""
    if usage is None or usage.total_s is None:
        return None
    end = time.time()
    arrival = end - usage.total_s
    return RequestMetrics(
        arrival_time=arrival,
        last_token_time=end if usage.num_output_tokens else arrival,
        first_scheduled_time=None if usage.queue_s is None else arrival + usage.queue_s,
        first_token_time=None if usage.first_token_s is None else arrival + usage.first_token_s,
        time_in_queue=usage.queue_s,
        finished_time=end,
        num_preemptions=usage.num_preemptions,
        num_cached_tokens=usage.num_cached_tokens,
    )


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None
