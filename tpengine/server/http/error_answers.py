"""Errors as HTTP tells them: a status, and OpenAI's body."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpengine import errors
from tpengine.sampling_params import SamplingParams
from tpengine.server.error_texts import field_in, log_internal_error, row_of, text_for_client

CLIENT_CLOSED_REQUEST = 499
"""Status of a request that another call has aborted. HTTP has none; nginx uses this one."""
_RETRY_AFTER_S = 2.0
"""For a server that loads or ends; a queue knows its own time."""


class HttpError(errors.MalformedRequestError):
    """A request breaks a rule of HTTP or of this server, apart from what it asks of the model.

    Attributes:
        status: of the answer.
        code: the rule, for programs.
        headers: further ones of the answer.
    """

    def __init__(
        self, message: str, status: int, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, status, code, headers)
        self.status = status
        self.code = code
        self.headers = headers or {}


STATUS_CODES: Mapping[type[Exception], tuple[int, str | None]] = {
    # error: status, and the code in the body
    errors.QueueFullError: (429, "rate_limit_exceeded"),
    errors.DeadlineExceededError: (408, "deadline_exceeded"),
    errors.RequestAbortedError: (CLIENT_CLOSED_REQUEST, "request_aborted"),
    errors.DuplicateRequestError: (409, "duplicate_request_id"),
    errors.ModelNotFoundError: (404, "model_not_found"),
    errors.NotKeptError: (410, "stream_not_kept"),
    errors.UnauthenticatedError: (401, "invalid_api_key"),
    errors.PermissionDeniedError: (403, "permission_denied"),
    errors.RequestIgnoredError: (400, "context_length_exceeded"),
    errors.RequestFailedError: (500, None),
    errors.RequestError: (400, None),
    errors.EngineLoadingError: (503, "loading"),
    errors.EngineDrainingError: (503, "draining"),
    errors.EngineDeadError: (503, "engine_dead"),
    Exception: (500, None),
}
"""Status and code of each kind of error; the row of the nearest base class counts."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIELDS = [one.name for one in dataclasses.fields(SamplingParams)]


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The answer to a client for an error.

    Attributes:
        body: `{"error": {"message", "type", "param", "code"}}`.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    def content(self) -> bytes:
        """The body in JSON."""
        return json.dumps(self.body).encode()


def refusal(error: Exception, request_id: str) -> HttpRefusal:
    """The answer for an error; logs it if it is a fault of the server."""
    status, code = row_of(error, STATUS_CODES)
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        status, code = error.status, error.code
        headers.update(error.headers)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status in (429, 503):
        wait_s = getattr(error, "retry_after_s", _RETRY_AFTER_S)
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    elif status == 500:
        log_internal_error(error, request_id)
    own_type = "server_error" if status >= 500 else "invalid_request_error"
    message = text_for_client(error, request_id)
    if isinstance(error, errors.RequestIgnoredError):  # litellm knows it by these words alone
        message = f"This model's maximum context length is exceeded: {message}"
    told = {
        "message": message,
        "type": _TYPES.get(status, own_type),
        "param": _param(error),
        "code": code,
    }
    return HttpRefusal(status, {"error": told}, headers)


def _param(error: Exception) -> str | None:
    """The field at fault, if the error knows it, or its text names a sampling parameter."""
    if isinstance(error, errors.ModelNotFoundError):
        return "model"
    if isinstance(error, errors.InvalidSamplingParamsError):
        return field_in(str(error), _FIELDS)
    param: str | None = getattr(error, "param", None)
    return param
