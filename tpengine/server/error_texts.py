"""What a client is told of an error, and what the log says of it, at all doors."""

from __future__ import annotations

import traceback

from tpengine import errors
from tpengine.logger import init_logger
from tpengine.server.limits import MAX_ERROR_TEXT

logger = init_logger(__name__)


def text_for_client(error: Exception, request_id: str, field: str | None = None) -> str:
    """The text of an error for a client, of at most `MAX_ERROR_TEXT` bytes. A fault of the server
    is logged.

    Args:
        field: path of the field at fault, as in `sampling.top_p`; None: no single field.
    """
    status = errors.status_of(type(error))
    if status.grpc == "INTERNAL":
        _log_fault(error, request_id)
    if status.text is not None:
        return f"{status.text} (request id {request_id})"
    text = str(error)
    if field is not None and field.rpartition(".")[2] not in text:
        text = f"{field}: {text}"
    data = text.encode(errors="replace")
    if len(data) > MAX_ERROR_TEXT:  # some errors quote their input
        return data[: MAX_ERROR_TEXT - 4].decode(errors="ignore") + " ..."
    return data.decode()


def _log_fault(error: Exception, request_id: str) -> None:
    """The text of a foreign exception may quote a prompt: only its place is logged."""
    own = isinstance(error, (errors.EngineError, errors.RequestError))
    frames = "".join(traceback.format_tb(error.__traceback__))
    text = str(error) if own else "(its text may hold a prompt; see it with level DEBUG)"
    logger.error("request %r: %s: %s\n%s", request_id, type(error).__name__, text, frames.rstrip())
    logger.debug("request %r: %s", request_id, error)
