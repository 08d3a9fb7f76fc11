"""Bounds of a message before it is parsed: an empty message inside it has 2 bytes here and takes
450 bytes of memory afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from google.protobuf.descriptor import Descriptor

from tpengine.errors import MalformedRequestError
from tpengine.server.limits import Limits

MAX_FIELDS = 1 << 16
"""Of a message and those inside it; a packed list of numbers is one field."""
_SMALL_BYTES = 2048
_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}


def check_fields(data: bytes, kind: Descriptor, limits: Limits) -> None:
    """Counts the fields of a serialised message up to their bounds.

    Bytes that are no message of this kind pass: the parser refuses them.

    Raises:
        MalformedRequestError: there are too many.
    """
    if len(data) > _SMALL_BYTES:
        bounds = {**limits.max_entries(), "messages": limits.max_chat_messages}
        try:
            _count(data, kind, bounds)
        except IndexError:  # it is no message
            return


def _count(data: bytes, kind: Descriptor, bounds: Mapping[str, int]) -> None:
    counts: Counter[str] = Counter()
    num_fields = 0
    parts = [(kind, 0, len(data))]
    while parts:
        kind, at, end = parts.pop()
        fields = kind.fields_by_number
        while at < end:
            key, at = _varint(data, at)
            field = fields.get(key >> 3)
            name = "" if field is None else field.name
            counts[name] += 1
            num_fields += 1
            if num_fields > MAX_FIELDS or counts[name] > bounds.get(name, MAX_FIELDS):
                raise MalformedRequestError(
                    f"the message has more than {bounds.get(name, MAX_FIELDS)} entries of "
                    f"{name or 'unknown fields'}; send fewer"
                )
            wire = key & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _BYTES:
                size, at = _varint(data, at)
                if field is not None and field.message_type is not None:
                    parts.append((field.message_type, at, min(at + size, end)))
                at += size
            elif wire in _FIXED_BYTES:
                at += _FIXED_BYTES[wire]
            else:
                return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it.

    Raises:
        IndexError: it is cut short, or has more than 64 bits.
    """
    value = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
