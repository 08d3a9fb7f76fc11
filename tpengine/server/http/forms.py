"""Bodies that are forms with files, multipart/form-data (https://www.rfc-editor.org/rfc/rfc7578)."""

from __future__ import annotations

from email import message_from_bytes
from email.message import Message
from typing import Any

from tpengine.errors import MalformedRequestError
from tpengine.server.http.error_answers import HttpError

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
