"""`SamplingParams` as a message: each parameter that gRPC has is the field of its name.

The type of a field in the message says how it is read and written. `_EXCEPTIONS` has the parameters
of which Python and the message hold different values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, cast

from google.protobuf.message import Message

from tpengine.proto import tpengine_pb2 as pb
from tpengine.sampling_params import PARAMETERS, SamplingParams

_FIELDS = dict(pb.SamplingParams.DESCRIPTOR.fields_by_name)
_MOST = 2**31 - 1
_ALL_BITS = 2**64 - 1
"""As a seed the same as -1, which `SamplingParams` takes for no seed."""
_EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: False,
    pb.EARLY_STOPPING_FIRST: True,
    pb.EARLY_STOPPING_NEVER: "never",
    pb.EARLY_STOPPING_HEURISTIC: False,
}
_EXCEPTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # parameter: how its value is written and read; noise depends on the 64 bits of a seed alone
    "seed": (
        lambda seed: seed - 2**64 if seed >= 2**63 else seed,
        lambda bits: _ALL_BITS if bits == -1 else bits,
    ),
    "early_stopping": (
        {value: number for number, value in _EARLY_STOPPING.items()}.__getitem__,
        lambda number: _EARLY_STOPPING.get(number, number),
    ),
}


def write_parameters(params: SamplingParams) -> dict[str, Any]:
    """All parameters that have a value, as arguments of `pb.SamplingParams`."""
    fields = {}
    for name, field in _FIELDS.items():
        value = getattr(params, name)
        if value is not None:
            if PARAMETERS[name].endless:
                value = min(value, _MOST)
            elif name in _EXCEPTIONS:
                value = _EXCEPTIONS[name][0](value)
            fields[name] = _to_field(field, value)
    return {"max_tokens": _MOST} | fields  # unset it would be the model's default


def read_parameters(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields of a message that are set, explicit zeros included, for `SamplingParams`."""
    fields = read_fields(message)
    for name in _EXCEPTIONS.keys() & fields.keys():
        fields[name] = _EXCEPTIONS[name][1](fields[name])
    return fields


def read_fields(message: Message) -> dict[str, Any]:
    """The fields of any message that are set. Messages become dicts, and one that has nothing but a
    list becomes this list."""
    return {field.name: read_field(field, value) for field, value in message.ListFields()}


def read_field(field: Any, value: Any) -> Any:
    """The value of a field, in Python's types."""
    kind = field.message_type
    if field.is_repeated and (kind is None or kind.GetOptions().map_entry):
        return list(value) if kind is None else dict(value)
    if field.is_repeated:
        return [_read_message(message) for message in value]
    return value if kind is None else _read_message(value)


def entries_of(value: Any) -> Collection[Any]:
    """The list or map that a field is, or that is all that its message has."""
    is_message = isinstance(value, Message)
    entries: Any = getattr(value, value.DESCRIPTOR.fields[0].name) if is_message else value
    return cast(Collection[Any], entries)


def _read_message(message: Message) -> Any:
    return list(entries_of(message)) if _is_list(message.DESCRIPTOR) else read_fields(message)


def _is_list(kind: Any) -> bool:
    return bool(len(kind.fields) == 1 and kind.fields[0].is_repeated)


def _to_field(field: Any, value: Any) -> Any:
    """A value as the constructor of its message takes it."""
    kind = field.message_type
    if kind is None:
        return json.dumps(value) if isinstance(value, dict) else value
    if kind.GetOptions().map_entry:
        return value
    if field.is_repeated:
        return [_to_message(kind, item) for item in value]
    return _to_message(kind, value)


def _to_message(kind: Any, value: Any) -> dict[str, Any]:
    if _is_list(kind):
        return {kind.fields[0].name: value}
    fields = {field.name: (field, getattr(value, field.name)) for field in kind.fields}
    return {name: _to_field(*field) for name, field in fields.items() if field[1] is not None}
