"""What a client is told of an error, and what the log says of it; all doors share both."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from typing import TypeVar

from tpengine import errors
from tpengine.logger import init_logger
from tpengine.server.limits import MAX_ERROR_TEXT

logger = init_logger(__name__)

Row = TypeVar("Row")

_WORDS: Mapping[type[Exception], str | None] = {
    # error: the text; None: the error's own text, which is written for the client
    errors.RequestFailedError: "the request failed while it ran",
    errors.RequestError: None,
    errors.EngineLoadingError: None,
    errors.EngineDrainingError: None,
    errors.EngineDeadError: (
        "the engine failed, and this server ends; ask another, or again when it is back"
    ),
    # The text of any other exception may hold anything, also another client's prompt.
    Exception: "the server failed; its log says more",
}


def row_of(error: Exception, table: Mapping[type[Exception], Row]) -> Row:
    """The row of an error's nearest base class in a table that has one for `Exception`."""
    return table[next(kind for kind in type(error).__mro__ if kind in table)]


def text_for_client(error: Exception, request_id: str, field: str | None = None) -> str:
    """The text of an error for a client, of at most `MAX_ERROR_TEXT` bytes.

    Args:
        field: path of the field at fault, as in `sampling.top_p`; None: no single field.
    """
    words = row_of(error, _WORDS)
    if words is not None:
        return f"{words} (request id {request_id})"
    text = str(error)
    if field is not None and field.rpartition(".")[2] not in text:
        text = f"{field}: {text}"
    data = text.encode(errors="replace")
    if len(data) > MAX_ERROR_TEXT:  # some errors quote their input
        return data[: MAX_ERROR_TEXT - 4].decode(errors="ignore") + " ..."
    return data.decode()


def field_in(text: str, names: Iterable[str]) -> str | None:
    """The first of these field names in the text of an error; None: it has none."""
    found = re.search(rf"\b({'|'.join(names)})\b", text)
    return found[0] if found else None


def log_internal_error(error: Exception, request_id: str) -> None:
    """Logs an internal error. The text of a foreign exception may quote a prompt: only its place is
    logged."""
    own = isinstance(error, (errors.EngineError, errors.RequestError))
    frames = "".join(traceback.format_tb(error.__traceback__))
    text = str(error) if own else "(its text may hold a prompt; see it with level DEBUG)"
    logger.error("request %r: %s: %s\n%s", request_id, type(error).__name__, text, frames.rstrip())
    logger.debug("request %r: %s", request_id, error)
