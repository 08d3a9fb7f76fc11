"""From the protocol's messages to the engine's, and the one table of status codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from tpengine import errors
from tpengine.engine.requests import GenerateRequest
from tpengine.sampling_params import RequestOutputKind, SamplingParams
from tpengine.server.grpc.proto import tpengine_pb2 as pb
from tpengine.server.limits import MAX_ERROR_TEXT, Limits, check_conversation, check_sampling

_FRAME_TOKENS = 16
INTERNAL_TEXT = "the server failed; its log says more"
"""All that a client learns of a fault that is not its own: an exception's text may hold anything,
another client's prompt too."""

STATUS_CODES: Mapping[type[Exception], tuple[grpc.StatusCode, str | None]] = {
    # error: code, and the words; None: those of the error, which were written for the caller
    errors.QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, None),
    errors.DeadlineExceededError: (grpc.StatusCode.DEADLINE_EXCEEDED, None),
    errors.RequestAbortedError: (grpc.StatusCode.CANCELLED, None),
    errors.DuplicateRequestError: (grpc.StatusCode.ALREADY_EXISTS, None),
    errors.ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, None),
    errors.UnauthenticatedError: (grpc.StatusCode.UNAUTHENTICATED, None),
    errors.PermissionDeniedError: (grpc.StatusCode.PERMISSION_DENIED, None),
    errors.RequestFailedError: (grpc.StatusCode.INTERNAL, "the request failed while it ran"),
    errors.RequestError: (grpc.StatusCode.INVALID_ARGUMENT, None),
    errors.EngineLoadingError: (grpc.StatusCode.UNAVAILABLE, None),
    errors.EngineDrainingError: (grpc.StatusCode.UNAVAILABLE, None),
    errors.EngineDeadError: (
        grpc.StatusCode.UNAVAILABLE,
        "the engine failed, and this server ends; ask another, or again when it is back",
    ),
    Exception: (grpc.StatusCode.INTERNAL, INTERNAL_TEXT),
}
"""What a client is told of each kind of error; the row of the nearest base class counts."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as a client gets to know it.

    Attributes:
        field: path of the field at fault, as in `sampling.top_p`; None: no single field.
        retry_after_s: when it may be worth to ask again; None: nobody knows.
    """

    code: grpc.StatusCode
    text: str
    field: str | None = None
    retry_after_s: float | None = None


def refusal(error: Exception, request: object, request_id: str) -> Refusal:
    """What to tell a client of an error.

    Args:
        request: the message that was being served; None: it was not understood.
    """
    row = next(kind for kind in type(error).__mro__ if kind in STATUS_CODES)
    code, words = STATUS_CODES[row]
    if words is not None:
        return Refusal(code, f"{words} (request id {request_id})")
    text, field = str(error), None
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = _field_at_fault(error, request)
        if field is not None and field.rpartition(".")[2] not in text:
            text = f"{field}: {text}"
    if len(text.encode()) > MAX_ERROR_TEXT:  # some errors quote what they were given
        text = text.encode()[: MAX_ERROR_TEXT - 4].decode(errors="ignore") + " ..."
    return Refusal(code, text, field, getattr(error, "retry_after_s", None))


def _field_at_fault(error: Exception, request: object) -> str | None:
    """The path of the field that an error is about; every error names its field."""
    text = str(error)
    if isinstance(error, errors.InvalidSamplingParamsError):
        name = _first_name(text, list(pb.SamplingParams.DESCRIPTOR.fields_by_name))
        return f"sampling.{name}" if name else "sampling"
    if isinstance(error, errors.InvalidPriorityError):
        return "priority"
    if isinstance(error, errors.InvalidPromptError):
        for name in ("request_id", "max_queue_ms", "timeout_ms"):
            if text.startswith(name):
                return name
        for kind in (pb.GenerateRequest, pb.TokenizeRequest):
            if isinstance(request, kind):
                return request.WhichOneof("input") or "input"
        if isinstance(request, pb.DetokenizeRequest):
            return "token_ids"
    return None


def _first_name(text: str, names: Sequence[str]) -> str | None:
    """Whichever of the names stands first in a text, as a word."""
    found = re.search(rf"\b({'|'.join(sorted(names, key=len, reverse=True))})\b", text)
    return found[0] if found else None


def read_generate_request(
    message: pb.GenerateRequest,
    kind: RequestOutputKind,
    limits: Limits,
    max_model_len: int,
) -> GenerateRequest:
    """The engine's form of a request; deadline and owner, which are the call's, are not in it.

    Raises:
        RequestError: a field is out of its bounds.
    """
    given = message.WhichOneof("input")
    if given is None:
        raise errors.InvalidPromptError(
            "a request needs prompt, prompt_token_ids or messages; got none of them"
        )
    check_sampling(message.sampling, limits, max_model_len, _max_prompt_len(message, max_model_len))
    messages = None
    if given == "messages":
        messages = read_conversation(message.messages, limits)
    return GenerateRequest(
        prompt=message.prompt if given == "prompt" else None,
        prompt_token_ids=list(message.prompt_token_ids.ids)
        if given == "prompt_token_ids"
        else None,
        messages=messages,
        params=read_sampling_params(message.sampling, kind),
        priority=message.priority,
        max_queue_s=_seconds("max_queue_ms", message.max_queue_ms)
        if message.HasField("max_queue_ms")
        else None,
    )


def _max_prompt_len(message: pb.GenerateRequest, max_model_len: int) -> int:
    """Tokens that the prompt can have."""
    if message.HasField("prompt_token_ids"):
        return min(len(message.prompt_token_ids.ids), max_model_len)
    if message.HasField("prompt"):  # a token is a byte at least, but for those that frame a text
        return min(len(message.prompt.encode()) + _FRAME_TOKENS, max_model_len)
    return max_model_len


def read_conversation(message: pb.Conversation, limits: Limits) -> list[dict[str, str]]:
    """Messages as the chat template takes them: what is not set is not there.

    Raises:
        InvalidPromptError: there are too many.
    """
    check_conversation(message, limits)
    return [{field.name: text for field, text in one.ListFields()} for one in message.messages]


def _seconds(name: str, milliseconds: int) -> float:
    if milliseconds < 0:
        raise errors.InvalidPromptError(f"{name} must be at least 0, got {milliseconds}")
    return milliseconds / 1e3


def read_sampling_params(message: pb.SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    """`SamplingParams` of exactly the fields that are set, a 0 among them.

    Raises:
        InvalidSamplingParamsError: a value is out of its range.
    """
    given: dict[str, Any] = {
        field.name: _READERS.get(field.name, _as_it_is)(value)
        for field, value in message.ListFields()
    }
    return SamplingParams(**given, output_kind=kind)


def _as_it_is(value: Any) -> Any:
    return value


def _read_early_stopping(value: int) -> bool | str:
    if value not in _EARLY_STOPPING:
        raise errors.InvalidSamplingParamsError(
            f"early_stopping must be one of {pb.EarlyStopping.keys()}, got {value}"
        )
    return _EARLY_STOPPING[value]


_EARLY_STOPPING: Mapping[int, bool | str] = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_HEURISTIC: False,
    pb.EARLY_STOPPING_FIRST: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "early_stopping": _read_early_stopping,
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "allowed_token_ids": lambda value: tuple(value.ids),
    "bad_words": tuple,
    "bad_words_token_ids": lambda value: tuple(tuple(word.ids) for word in value),
}
