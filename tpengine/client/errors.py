"""Status codes of gRPC as errors of this package: those that the engine raises in process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from tpengine.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidPriorityError,
    InvalidPromptError,
    InvalidSamplingParamsError,
    ModelNotFoundError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    RequestError,
    ServerError,
    ServerUnavailableError,
    TPEngineError,
    UnauthenticatedError,
)
from tpengine.server.grpc.proto import STATUS_DETAILS_KEY


def to_error(error: grpc.aio.AioRpcError, target: str) -> TPEngineError:
    """The exception for the status of a call."""
    code, words = error.code(), f"{target}: {error.details()}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = _retry_after_s(error)
        if retry_after_s is not None:
            return QueueFullError(words, retry_after_s)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        found = _PHASE.search(words)
        where = "queued" if _NEVER_STARTED in words else found[1] if found else "unknown"
        return DeadlineExceededError(words, where)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _kind_at_fault(_fields_at_fault(error))(words)
    kind = _ERRORS.get(code)
    if kind is not None:
        return kind(words)
    if code is grpc.StatusCode.UNAVAILABLE:
        if _NO_TLS in words:
            words += "; the server does not speak TLS: connect without it"
        if _NO_SERVER in words:
            words += "; no server is there: start one with `tpengine serve`, or give its address"
        return ServerUnavailableError(words, code.name)
    return ServerError(words, code.name)


_PHASE = re.compile(r"it was in '(queued|prefill|decode)'")
_NEVER_STARTED = "without being started"
_NO_TLS = "WRONG_VERSION_NUMBER"
"""OpenSSL's error for the first bytes of a server without TLS."""
_NO_SERVER = "Connection refused"
"""The kernel's error for a port on which no process listens."""
_PROMPT_FIELDS = (
    "prompt", "prompt_token_ids", "messages", "input", "request_id", "max_queue_ms", "token_ids"
)  # fmt: skip
_ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestError,  # too large a message: no retry helps
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.CANCELLED: RequestAbortedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    """The packed messages of a status; empty if there are none or they cannot be read."""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []


def _fields_at_fault(error: grpc.aio.AioRpcError) -> list[str]:
    """Paths of the fields at fault, as in `sampling.top_p`."""
    refused = error_details_pb2.BadRequest()
    return [
        violation.field
        for detail in _details(error)
        if detail.Unpack(refused)
        for violation in refused.field_violations
    ]


def _kind_at_fault(fields: Sequence[str]) -> type[RequestError]:
    """The error that the engine raises in process for such a field."""
    for field in fields:
        name = field.partition(".")[0]
        if name == "sampling":
            return InvalidSamplingParamsError
        if name == "priority":
            return InvalidPriorityError
        if name in _PROMPT_FIELDS:
            return InvalidPromptError
    return RequestError


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    retry = error_details_pb2.RetryInfo()
    for detail in _details(error):
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToTimedelta().total_seconds())
    return None
