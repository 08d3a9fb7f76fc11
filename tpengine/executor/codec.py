"""Steps, calls and their answers as msgpack: plain data, so that decoding it can run no code.

A dataclass becomes the array of its fields in their order. A logits processor that is a function
was pickled by the engine when its request was added; its bytes are data here, and a rank makes a
function of them. No answer holds such bytes. Both ends run the same version of the code. msgspec
was measured against msgpack: it is shorter only without the short forms below, and then slower for
a step of 256 decodes, 15.0 against 11.7 us to encode and decode.

Calls are rare, and their arguments are of many types: each object says its class, one of few, and
tuples stay tuples.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgpack

from tpengine import config, messages
from tpengine.checkpoint.model_files import ModelFields
from tpengine.errors import EngineError
from tpengine.executor.diagnosis import KeptMemory, RankPlace
from tpengine.structured.grammars import Vocabulary

Message = TypeVar("Message")

_BUFFER_BYTES = 8192
"""At first; it grows. By default it is 256 KiB, whose fresh pages cost more than most messages."""
_TEXT_ERRORS = "surrogatepass"
"""Paths that are no UTF-8 have lone surrogates, as Python reads them; errors quote such paths."""
_MAX_ITEMS = 1 << 27
"""Bound of a decoded array or map; the channel bounds the bytes."""
_FIRST_ROWS = list(range(1024))
_GETTERS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*(field.name for field in dataclasses.fields(kind)))
    for kind in (*vars(config).values(), *vars(messages).values(), KeptMemory, RankPlace)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
"""How the fields of an object are read."""
assert all(len(dataclasses.fields(kind)) > 1 for kind in _GETTERS), "a getter of one gives no tuple"
_ARGS = _GETTERS | {
    tuple: lambda value: (list(value),),
    frozenset: lambda value: (list(value),),
    ModelFields: lambda value: (dict(value),),
    Vocabulary: lambda value: value.__reduce__()[1],
}
"""Classes whose objects may travel in calls, and the arguments that make an equal object."""
_CLASSES = {kind.__name__: kind for kind in _ARGS}


def encode(message: messages.StepInput | messages.StepOutput | tuple[Any, ...]) -> bytes:
    """One message as bytes.

    Raises:
        TypeError: it holds something that is not plain data.
    """
    packer = msgpack.Packer(default=_plain, buf_size=_BUFFER_BYTES, unicode_errors=_TEXT_ERRORS)
    return cast(bytes, packer.pack(message))


def _plain(value: Any) -> Any:
    """Called by msgpack for an object that it does not know."""
    kind = type(value)
    if kind is messages.StepInput:
        return _plain_step(value)
    if kind is messages.StepOutput:
        return _plain_output(value)
    if (getter := _GETTERS.get(kind)) is not None:
        return getter(value)
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    raise TypeError(f"{kind.__name__} is no plain data and cannot be sent to a rank")


def _plain_step(step: messages.StepInput) -> list[Any]:
    """In a step of decodes each row has one token and is sampled into its own slot: lists that only
    say that become None, and lists of small numbers become bytes, which is several times as fast.
    """
    slots, tokens, num_rows = step.slots, step.num_scheduled_tokens, len(step.slots)
    is_one_each = len(tokens) == num_rows and tokens.count(1) == num_rows
    return [
        step.step,
        _as_bytes(slots),
        None if is_one_each else _as_bytes(tokens),
        step.new_sequences,
        step.new_block_ids,
        step.freed_slots,
        step.token_overrides,
        None if step.sample_rows == _all_rows(num_rows) else _as_bytes(step.sample_rows),
        None if step.sample_slots == slots else _as_bytes(step.sample_slots),
        step.forks,
        step.replaced_block_ids,
        step.block_moves or None,
        step.adapter_loads,
        step.drafts,
        step.dropped_pictures,
        step.picture_loads,
        step.computed_pictures,
        step.num_awaited_rows,
    ]


def _as_bytes(numbers: list[int]) -> bytes | list[int]:
    try:
        return bytes(numbers)
    except ValueError:  # a number above 255
        return numbers


def _all_rows(count: int) -> list[int]:
    return _FIRST_ROWS[:count] if count <= len(_FIRST_ROWS) else list(range(count))


def _plain_output(output: messages.StepOutput) -> list[Any]:
    step, token_ids, *rest, chosen_logprobs = _GETTERS[messages.StepOutput](output)
    return [step, _as_words(token_ids), *rest, chosen_logprobs.tobytes()]


def _as_words(token_ids: list[int]) -> bytes | list[int]:
    """Token ids become bytes, four each, which is twice as fast as numbers."""
    try:
        return array.array("I", token_ids).tobytes()
    except (OverflowError, TypeError):  # other values than such numbers
        return token_ids


def decode_plain(
    data: bytes | bytearray | memoryview, make_object: Callable[[int, bytes], Any] = msgpack.ExtType
) -> Any:
    """Arrays as lists, maps as dicts, numbers and text.

    Raises:
        EngineError: the bytes are no message.
    """
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS,
            ext_hook=make_object, unicode_errors=_TEXT_ERRORS,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException) as error:
        raise EngineError(f"a message between driver and rank cannot be decoded: {error}") from None


def decode_step(data: bytes | bytearray | memoryview) -> messages.StepInput:
    """The step that `encode` was given, equal in every field.

    Raises:
        EngineError: the bytes are no step of this version.
    """
    return _build(_step_input, data)


def decode_output(data: bytes | bytearray | memoryview) -> messages.StepOutput:
    """The answer that `encode` was given, equal in every field.

    Raises:
        EngineError: the bytes are no answer of this version.
    """
    return _build(_step_output, data)


def _build(
    build: Callable[[list[Any]], Message],
    data: bytes | bytearray | memoryview,
    make_object: Callable[[int, bytes], Any] = msgpack.ExtType,
) -> Message:
    try:
        return build(decode_plain(data, make_object))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise EngineError(
            f"a message between driver and rank is of another version: {error}; all machines must "
            "have the same version of tpengine"
        ) from error


def _step_input(fields: list[Any]) -> messages.StepInput:
    """The reverse of `_plain_step`: lists may be None or bytes, objects are arrays."""
    step: Any = messages.StepInput(*fields)
    slots = step.slots = list(step.slots)
    tokens, rows = step.num_scheduled_tokens, step.sample_rows
    step.num_scheduled_tokens = [1] * len(slots) if tokens is None else list(tokens)
    step.sample_rows = _all_rows(len(slots)) if rows is None else list(rows)
    step.sample_slots = slots.copy() if step.sample_slots is None else list(step.sample_slots)
    step.new_sequences = [_new_sequence(fields) for fields in step.new_sequences]
    step.new_block_ids = [(slot, blocks) for slot, blocks in step.new_block_ids]
    step.token_overrides = _pairs(step.token_overrides)
    step.drafts = [(slot, token_ids) for slot, token_ids in step.drafts]
    step.forks = [messages.Fork(*fields) for fields in step.forks]
    step.replaced_block_ids = [(slot, at, block) for slot, at, block in step.replaced_block_ids]
    step.adapter_loads = [messages.AdapterLoad(*fields) for fields in step.adapter_loads]
    step.picture_loads = [messages.PictureLoad(*fields) for fields in step.picture_loads]
    step.block_moves = messages.BlockMoves(*map(_pairs, step.block_moves or ()))
    return cast(messages.StepInput, step)


def _pairs(values: list[list[int]]) -> list[tuple[int, int]]:
    return [(first, second) for first, second in values]


def _new_sequence(fields: list[Any]) -> messages.NewSequence:
    sequence: Any = messages.NewSequence(*fields)
    sequence.rules = messages.SamplingRules(*sequence.rules)
    sequence.pictures = [messages.PictureSpan(*fields) for fields in sequence.pictures]
    if sequence.cross is not None:
        sequence.cross = messages.CrossInput(*sequence.cross)
    return cast(messages.NewSequence, sequence)


def _by_place(kind: type[Any], entries: dict[int, list[Any]]) -> dict[int, Any]:
    return {at: kind(*entry) for at, entry in entries.items()}


def _step_output(fields: list[Any]) -> messages.StepOutput:
    """The reverse of `_plain_output`."""
    output: Any = messages.StepOutput(*fields)
    if type(output.token_ids) is bytes:
        output.token_ids = memoryview(output.token_ids).cast("I").tolist()
    output.chosen_logprobs = array.array("f", output.chosen_logprobs)
    output.errors = _by_place(messages.RowError, output.errors)
    output.logprobs = _by_place(messages.TokenLogprobs, output.logprobs)
    output.candidates = _by_place(messages.Candidates, output.candidates)
    output.prompt_logprobs = {
        row: messages.PromptLogprobs(first, [messages.TokenLogprobs(*top) for top in entries])
        for row, (first, entries) in output.prompt_logprobs.items()
    }
    return cast(messages.StepOutput, output)


def encode_call(value: Any) -> bytes:
    """A call's (method, args, kwargs), or what it returned, as bytes.

    Raises:
        TypeError: it holds something that is not plain data.
    """
    packed = msgpack.packb(
        value, default=_plain_object, strict_types=True, unicode_errors=_TEXT_ERRORS
    )
    return cast(bytes, packed)


def _plain_object(value: Any) -> Any:
    """Called by msgpack for an object that it does not know."""
    kind = type(value)
    if hasattr(value, "item"):  # a number of numpy
        return value.item()
    if kind not in _ARGS:
        raise TypeError(f"{kind.__name__} is no plain data and cannot be sent to a rank")
    return msgpack.ExtType(0, encode_call([kind.__name__, list(_ARGS[kind](value))]))


def decode_call(data: bytes) -> Any:
    """What `encode_call` was given.

    Raises:
        EngineError: the bytes are no call of this version.
    """
    return _build(lambda value: value, data, _object)


def _object(_: int, data: bytes) -> Any:
    """The reverse of `_plain_object`."""
    name, args = decode_call(data)
    return _CLASSES[name](*args)
