"""Errors as HTTP tells them: a status, and OpenAI's body."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tpengine import errors
from tpengine.server.error_texts import text_for_client
from tpengine.server.http.json_text import JsonAnswer


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


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def refusal(error: Exception, request_id: str) -> JsonAnswer:
    """OpenAI's answer for an error: `error` with `message`, `type`, `param`, `code`. Logs a fault
    of the server."""
    known = errors.status_of(type(error))
    status, code, headers = known.http, known.code, dict[str, str]()
    if isinstance(error, HttpError):
        status, code, headers = error.status, error.code, dict(error.headers)
    wait_s = errors.retry_after_s(error)
    if wait_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    message = text_for_client(error, request_id)
    if isinstance(error, errors.RequestIgnoredError):  # litellm knows it by these words alone
        message = f"This model's maximum context length is exceeded: {message}"
    body = {
        "message": message,
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": getattr(error, "field", None),
        "code": code,
    }
    return JsonAnswer({"error": body}, status, headers)
