"""A call over HTTP: who makes it, until when, and its body: JSON, or a form with files."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable
from email import message_from_bytes
from email.message import Message
from typing import Any, NoReturn

import orjson
from starlette.requests import Request

from tpengine.errors import MalformedRequestError, MessageTooLargeError
from tpengine.proto import RESUME_WINDOW_KEY, TIMEOUT_KEY
from tpengine.server.auth import Call
from tpengine.server.http.error_answers import HttpError
from tpengine.server.kept_streams import KeptStreams, Resumption
from tpengine.server.limits import check_request_id, read_timeout
from tpengine.server.state import ServerState

KEY_HEADER, POSITION_HEADER = "idempotency-key", "last-event-id"
_MAX_DIGITS = 12
_MAX_DEPTH = 254
"""Of arrays and objects in a body: the limit of `orjson.dumps`."""
_LARGE_BYTES = 1 << 16
_PAUSES = 3
"""Length of a pause, in multiples of the time of parsing before it."""
_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)


class ParseTurns:
    """Bounds the time for which bodies are parsed: the parser holds the interpreter's lock, and the
    engine's thread waits for it. A body of 655 KB takes 1.4 ms if it holds ids, and 10 ms if it
    holds 218,000 empty messages (Zen 5).

    Large bodies are parsed one after the other, with a pause after each: together they take at most
    a quarter of the time.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next_at = 0.0

    async def parse(self, body: bytes) -> dict[str, Any]:
        """The JSON object of a body.

        Raises:
            MalformedRequestError: it is none.
        """
        if len(body) < _LARGE_BYTES:
            return _parse(body)
        async with self._turn:
            await asyncio.sleep(self._next_at - time.monotonic())
            begin = time.monotonic()
            try:
                return _parse(body)
            finally:
                end = time.monotonic()
                self._next_at = end + _PAUSES * (end - begin)


async def read_call(request: Request) -> Call:
    """Reads the body of a call, whose client has been identified. Before a web page of another
    origin sends JSON, its browser asks the server, which by default does not allow it.

    The task that serves a call is cancelled when its client has left, so a route needs no watch for
    that: leaving `ServerState.open` frees the request's blocks.

    Raises:
        MessageTooLargeError: the body is too large.
        HttpError: it does not arrive in time (408), or is not declared as plain JSON (415).
        MalformedRequestError: it is not a JSON object, or the deadline is not a number.
    """
    kind = request.headers.get("content-type", "")
    if _JSON.match(kind) is None:
        hint = "send the header 'content-type: application/json'"
        text = f"the content type must be application/json, got {kind[:80]!r}; {hint}"
        raise HttpError(text, 415, "unsupported_media_type")
    return await _read(request, request.app.state.turns.parse)


async def read_form(request: Request) -> Call:
    """Reads the body of a call that is a form, see `parse_form`; else as `read_call`.

    A browser sends forms of a page to any server without asking it, so those of pages of other
    origins than the allowed ones are refused here.

    Raises:
        HttpError: also with status 403, for a page that may not call.
    """
    origin, allowed = request.headers.get("origin"), request.app.state.origins
    is_own = origin is not None and origin.partition("://")[2] == request.headers.get("host")
    if not (origin is None or is_own or {"*", origin} & set(allowed)):
        text = f"pages of {origin[:80]} may not send forms to this server"
        raise HttpError(f"{text}; see --cors-origin", 403, "origin_not_allowed")
    kind = request.headers.get("content-type", "")
    return await _read(request, lambda body: asyncio.to_thread(parse_form, kind, body))


async def _read(request: Request, parse: Callable[[bytes], Awaitable[dict[str, Any]]]) -> Call:
    named = request.headers.get(TIMEOUT_KEY)
    deadline = None if named is None else time.monotonic() + read_timeout(named)
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        text = f"content-encoding {encoding[:20]!r} is not read here; send the body uncompressed"
        raise HttpError(text, 415, "unsupported_media_type")
    server: ServerState = request.app.state.server
    body = await _read_body(request, server.max_message_bytes, server.limits.message_s)
    return Call(request.state.request_id, request.state.client, deadline, await parse(body))


def read_resumption(request: Request, call: Call, kept: KeptStreams) -> Resumption | None:
    """What a call asks of kept streams; None: nothing, or the server keeps none.

    Raises:
        HttpError: it is no stream, has no key, or its position is no number (400).
        RequestError: the window or the key cannot be used.
    """
    asked, position = (request.headers.get(name) for name in (RESUME_WINDOW_KEY, POSITION_HEADER))
    if asked is None and position is None:  # a key alone asks for nothing
        return None
    key = request.headers.get(KEY_HEADER)
    if key is None or call.message.get("stream") is not True:
        text = f"{RESUME_WINDOW_KEY} and {POSITION_HEADER} are for streams with a key"
        hint = f'send {KEY_HEADER} and "stream": true, or neither of the two'
        raise HttpError(f"{text}; {hint}", 400, "not_resumable")
    check_request_id(key, KEY_HEADER)
    position = position or "0"
    if not position.isdecimal() or len(position) > _MAX_DIGITS:
        text = f"{POSITION_HEADER} must be the id of an event of this stream, got {position[:20]!r}"
        raise HttpError(text, 400, "invalid_event_id")
    window_s = kept.granted_s(RESUME_WINDOW_KEY, asked or "0")
    if not window_s and not int(position):
        return None
    body = orjson.dumps(call.message, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(request.url.path.encode() + body).digest()
    return Resumption(call.client.owner.account, f"HTTP {key}", digest, window_s, int(position))


async def _read_body(request: Request, most: int, timeout_s: float) -> bytes:
    """Reads the body within its bounds.

    Raises:
        MessageTooLargeError: it is too large.
        HttpError: it has not arrived in time.
    """
    # llhttp bounds the value, but not the zeros in front of it, and int() reads 4,300 digits.
    declared = request.headers.get("content-length", "").lstrip("0")
    if declared.isdecimal() and int(declared) > most:
        _refuse_size(declared, most)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    _refuse_size(f"more than {most}", most)
    except TimeoutError:
        came = f"{len(body)} bytes of the body came within {timeout_s:g} s"
        raise HttpError(f"{came}, and not the rest; send it faster", 408, "body_timeout") from None
    return bytes(body)


def _refuse_size(size: str, most: int) -> NoReturn:
    raise MessageTooLargeError(
        f"the body has {size} bytes, and may have at most {most} (--max-message-mib); send less"
    )


def _parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; its strings are valid Unicode, and its numbers finite.

    By orjson: the `json` module takes 16 ms for 320,000 ids, orjson 1.5 ms.

    Raises:
        MalformedRequestError: it is none.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # its text has no text of the body
        raise MalformedRequestError(f"the body is not valid JSON: {error}") from None
    if body.count(b"[") + body.count(b"{") > _MAX_DEPTH:
        try:
            orjson.dumps(parsed)  # counts in C; others come to Python's limit later
        except orjson.JSONEncodeError:
            text = f"the body is nested more than {_MAX_DEPTH} deep; send it flatter"
            raise MalformedRequestError(text) from None
    if not isinstance(parsed, dict):
        raise MalformedRequestError(f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


_MAX_PARTS = 64
_MAX_HEAD_BYTES = 8192
"""Of a part."""


def parse_form(kind: str, body: bytes) -> dict[str, Any]:
    """Returns the fields of a form by name: a file as bytes, others as text; of a name that ends in
    [] a list.

    Args:
        kind: the header content-type.

    Raises:
        HttpError: another form is declared (415).
        MalformedRequestError: the body is no such form, or a name comes twice.
    """
    declared = Message()
    declared["content-type"] = kind
    boundary = declared.get_boundary()
    if declared.get_content_type() != "multipart/form-data" or not boundary:
        text = f"the content type must be multipart/form-data with a boundary, got {kind[:80]!r}"
        raise HttpError(f"{text}; send the file as a form", 415, "unsupported_media_type")
    _, *parts = (b"\r\n" + body).split(
        b"\r\n--" + boundary.encode("latin-1", "replace"), _MAX_PARTS
    )
    if not parts or not parts[-1].startswith(b"--"):
        text = f"the body has no closing boundary among its first {_MAX_PARTS} boundaries"
        raise MalformedRequestError(f"{text}; send the whole form, or fewer fields")
    fields: dict[str, Any] = {}
    for part in parts[:-1]:
        name, value = _parse_part(part)
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise MalformedRequestError(f"the form has {name[:80]!r} twice; send it once")
        else:
            fields[name] = value
    return fields


def _parse_part(part: bytes) -> tuple[str, str | bytes]:
    head, _, content = part.partition(b"\r\n\r\n")
    headers = message_from_bytes(head[:_MAX_HEAD_BYTES].strip())
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name or len(head) > _MAX_HEAD_BYTES:
        raise MalformedRequestError("a part of the form has no name; send each field with one")
    if headers.get_param("filename", header="content-disposition") is not None:
        return name, content
    try:
        return name, content.decode()
    except UnicodeDecodeError:
        text = f"the field {name[:80]!r} is no text in UTF-8, and no file"
        raise MalformedRequestError(f"{text}; give a file a filename") from None
