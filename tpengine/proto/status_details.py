"""A request's error in the trailers of a call, in gRPC's richer error model. A server writes it; a
client reads it, and raises what the engine raises in process."""

from __future__ import annotations

import re
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tpengine import errors
from tpengine.proto import STATUS_DETAILS_KEY

_PARAMETERS = re.compile(r"^(sampling|pooling)\.")
"""In front of the name of a parameter in the path of a field."""


def _reason(kind: type[Exception]) -> str:
    """The name of a kind of error in the form that gRPC has for them, as in `QUEUE_FULL`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__.removesuffix("Error")).upper()


_DOMAIN = "tpengine"
_KINDS: dict[str, type[errors.RequestError]] = {
    _reason(kind): kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.RequestError)
    and errors.status_of(kind).text is None
}
_KINDS_BY_CODE = {
    status.grpc: kind
    for kind, status in reversed([*errors.STATUSES.items()])
    if kind in _KINDS.values()
}


def write_details(
    error: Exception, text: str, request_id: str, field: str | None
) -> tuple[tuple[str, bytes], ...]:
    """The trailers for an error.

    Args:
        text: what the client is told of it.
        field: path in the client's message of the field at fault; None: no single field.
    """
    code = grpc.StatusCode[errors.status_of(type(error)).grpc]
    details: list[Any] = [RequestInfo(request_id=request_id)]
    if isinstance(error, errors.RequestError):
        where = getattr(error, "where", None)
        metadata = {} if where is None else {"where": where}
        info = ErrorInfo(reason=_reason(type(error)), domain=_DOMAIN, metadata=metadata)
        details.append(info)
    if field is not None:
        violation = BadRequest.FieldViolation(field=field, description=text)
        details.append(BadRequest(field_violations=[violation]))
    retry_after_s = errors.retry_after_s(error)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(RetryInfo(retry_delay=delay))
    status = Status(code=code.value[0], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def has_details(trailers: Any) -> bool:
    """Whether a call has ended by a server's word, and not by the loss of its connection."""
    return STATUS_DETAILS_KEY in dict(trailers or ())


def read_error(code: str, text: str, trailers: Any) -> errors.RequestError | None:
    """The error of a call that has ended with this code; None: it is no `RequestError`."""
    info, request, retry = ErrorInfo(), BadRequest(), RetryInfo()
    try:
        status = Status.FromString(dict(trailers or ()).get(STATUS_DETAILS_KEY, b""))
        for packed in status.details:
            any(packed.Unpack(detail) for detail in (info, request, retry))
    except DecodeError:
        pass  # not of this server; the code is known all the same
    kind: Any
    if info.domain == _DOMAIN:
        kind = _KINDS.get(info.reason)
    elif code == "RESOURCE_EXHAUSTED":  # a proxy, or gRPC itself, says only when to try again
        kind = errors.QueueFullError if retry.HasField("retry_delay") else errors.RequestError
    else:
        kind = _KINDS_BY_CODE.get(code)
    if kind is None:
        return None
    error: errors.RequestError
    if issubclass(kind, errors.QueueFullError):
        error = kind(text, retry.retry_delay.ToNanoseconds() / 1e9)
    elif issubclass(kind, errors.DeadlineExceededError):
        error = kind(text, info.metadata.get("where", "unknown"))
    else:
        error = kind(text)
    for violation in request.field_violations:
        error.field = _PARAMETERS.sub("", violation.field)
    return error
