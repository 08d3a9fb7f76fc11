"""Steps and their answers as msgpack: plain data, no pickle, so that bytes can run no code.

A dataclass becomes the array of its fields in their order, `SamplingParams` the map of those that
are not at their default. Both ends run the same version of the code.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import msgpack

from tpengine.errors import EngineError
from tpengine.messages import (
    BlockMoves,
    Candidates,
    Fork,
    NewSequence,
    PromptLogprobs,
    StepInput,
    StepOutput,
    TokenLogprobs,
)
from tpengine.sampling_params import RequestOutputKind, SamplingParams

_BUFFER_BYTES = 8192
"""To begin with; it grows."""
_MAX_ITEMS = 1 << 27
"""Bound of any array or map that is decoded; frames are bounded in bytes before."""


def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return cast(
        Callable[[Any], tuple[Any, ...]],
        attrgetter(*(field.name for field in dataclasses.fields(kind))),
    )


_GETTERS = {
    kind: _getter(kind)
    for kind in (
        BlockMoves,
        Candidates,
        Fork,
        NewSequence,
        PromptLogprobs,
        StepInput,
        StepOutput,
        TokenLogprobs,
    )
}
_PARAM_DEFAULTS: dict[str, Any] = dict(vars(SamplingParams()))


def _plain(value: Any) -> Any:
    """What msgpack asks for an object that it does not know."""
    if type(value) is StepInput:
        return _plain_step(value)
    if type(value) is StepOutput:
        return _plain_output(value)
    getter = _GETTERS.get(type(value))
    if getter is not None:
        return getter(value)
    if type(value) is SamplingParams:
        fields = vars(value).items()
        return {name: field for name, field in fields if field != _PARAM_DEFAULTS[name]}
    if type(value) is RequestOutputKind:
        return value.value
    if hasattr(value, "item"):  # a number of numpy's
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data and cannot be sent to a rank")


def _plain_step(step: StepInput) -> list[Any]:
    """Lists of a number per row are short where they say little, as in a step of decodes: one
    token of every row, all rows sampled into their own slots. That is several times as fast."""
    values = list(_GETTERS[StepInput](step))
    slots = step.slots
    if step.sample_slots == slots:
        values[_SAMPLE_SLOTS] = None
    else:
        values[_SAMPLE_SLOTS] = _as_bytes(step.sample_slots)
    next_slots = step.next_slots
    values[_NEXT_SLOTS] = None if next_slots == slots else _as_bytes(next_slots)
    num_rows = len(slots)
    tokens, rows = step.num_scheduled_tokens, step.sample_rows
    all_one = len(tokens) == num_rows and tokens.count(1) == num_rows
    values[_NUM_SCHEDULED] = None if all_one else _as_bytes(tokens)
    values[_SAMPLE_ROWS] = None if rows == _all_rows(num_rows) else _as_bytes(rows)
    values[_SLOTS] = _as_bytes(slots)
    if not step.block_moves:
        values[_BLOCK_MOVES] = None
    return values


def _as_bytes(numbers: list[int]) -> bytes | list[int]:
    """As bytes where all are small enough, as they mostly are."""
    try:
        return bytes(numbers)
    except ValueError:  # a number above 255
        return numbers


def _all_rows(count: int) -> list[int]:
    return _FIRST_ROWS[:count] if count <= len(_FIRST_ROWS) else list(range(count))


def _plain_output(output: StepOutput) -> list[Any]:
    """Token ids are bytes, four each, which is twice as fast as numbers one by one."""
    values = list(_GETTERS[StepOutput](output))
    try:  # `suppress` costs as much as the conversion
        values[_TOKEN_IDS] = array.array("I", output.token_ids).tobytes()
    except (OverflowError, TypeError):  # no such number: as they are
        return values
    return values


def encode(message: StepInput | StepOutput | tuple[Any, ...]) -> bytes:
    """One message as bytes.

    Raises:
        TypeError: it holds something that is no plain data.
    """
    # A packer's buffer is 256 KiB by default, and fresh pages cost more than most messages.
    return cast(bytes, msgpack.Packer(default=_plain, buf_size=_BUFFER_BYTES).pack(message))


def decode_plain(data: bytes | bytearray | memoryview) -> Any:
    """Arrays as lists, maps as dicts, numbers and text.

    Raises:
        EngineError: the bytes are no message.
    """
    try:
        return msgpack.unpackb(
            data, strict_map_key=False, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise EngineError(f"a message between driver and rank cannot be decoded: {error}") from None


def decode_step(data: bytes | bytearray | memoryview) -> StepInput:
    """The step that `encode` was given, equal in every field.

    Raises:
        EngineError: the bytes are no step of this version.
    """
    step: StepInput = _build(StepInput, _step_input, data)
    return step


def decode_output(data: bytes | bytearray | memoryview) -> StepOutput:
    """The answer that `encode` was given, equal in every field.

    Raises:
        EngineError: the bytes are no answer of this version.
    """
    output: StepOutput = _build(StepOutput, _step_output, data)
    return output


def _build(kind: type[Any], build: Callable[[list[Any]], Any], data: Any) -> Any:
    try:
        return build(decode_plain(data))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise EngineError(
            f"a message between driver and rank is no {kind.__name__} of this version: {error}; "
            "all machines must have the same version of tpengine"
        ) from error


def _step_input(values: list[Any]) -> StepInput:
    step = StepInput(*values)
    step.slots = list(step.slots)
    num_rows = len(step.slots)
    tokens, rows, slots = (values[place] for place in (_NUM_SCHEDULED, _SAMPLE_ROWS, _SAMPLE_SLOTS))
    step.num_scheduled_tokens = [1] * num_rows if tokens is None else list(tokens)
    step.sample_rows = _all_rows(num_rows) if rows is None else list(rows)
    step.sample_slots = step.slots.copy() if slots is None else list(slots)
    next_slots = values[_NEXT_SLOTS]
    step.next_slots = step.slots.copy() if next_slots is None else list(next_slots)
    if step.new_sequences:
        step.new_sequences = [_new_sequence(fields) for fields in values[_NEW_SEQUENCES]]
    if step.new_block_ids:
        step.new_block_ids = [(slot, blocks) for slot, blocks in step.new_block_ids]
    if step.token_overrides:
        step.token_overrides = [(slot, token) for slot, token in step.token_overrides]
    if step.forks:
        step.forks = [Fork(*fields) for fields in values[_FORKS]]
    if step.replaced_block_ids:
        step.replaced_block_ids = [(slot, at, block) for slot, at, block in step.replaced_block_ids]
    if values[_BLOCK_MOVES] is None:
        step.block_moves = BlockMoves()
    else:
        outs, ins, copies = (_pairs(moves) for moves in values[_BLOCK_MOVES])
        step.block_moves = BlockMoves(outs, ins, copies)
    return step


def _place(kind: type[Any], name: str) -> int:
    return [field.name for field in dataclasses.fields(kind)].index(name)


_SLOTS = _place(StepInput, "slots")
_NUM_SCHEDULED = _place(StepInput, "num_scheduled_tokens")
_SAMPLE_ROWS = _place(StepInput, "sample_rows")
_SAMPLE_SLOTS = _place(StepInput, "sample_slots")
_TOKEN_IDS = _place(StepOutput, "token_ids")
_FIRST_ROWS = list(range(1024))
_NEW_SEQUENCES = _place(StepInput, "new_sequences")
_FORKS = _place(StepInput, "forks")
_BLOCK_MOVES = _place(StepInput, "block_moves")
_NEXT_SLOTS = _place(StepInput, "next_slots")


def _pairs(values: list[list[int]]) -> list[tuple[int, int]]:
    return [(source, target) for source, target in values]


def _new_sequence(fields: list[Any]) -> NewSequence:
    sequence = NewSequence(*fields)
    sequence.sampling_params = _sampling_params(cast("dict[str, Any]", sequence.sampling_params))
    return sequence


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """The driver has checked the values, so that the checks at construction are not repeated."""
    params = object.__new__(SamplingParams)
    changed = {name: _as_tuples(value) for name, value in fields.items()}
    if "output_kind" in changed:
        changed["output_kind"] = RequestOutputKind(changed["output_kind"])
    if not changed.keys() <= _PARAM_DEFAULTS.keys():
        raise ValueError(f"unknown fields {sorted(changed.keys() - _PARAM_DEFAULTS.keys())}")
    vars(params).update(_PARAM_DEFAULTS | changed)
    return params


def _as_tuples(value: Any) -> Any:
    """`SamplingParams` holds sequences as tuples."""
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _step_output(values: list[Any]) -> StepOutput:
    output = StepOutput(*values)
    if type(values[_TOKEN_IDS]) is bytes:
        output.token_ids = memoryview(values[_TOKEN_IDS]).cast("I").tolist()
    if output.logprobs:
        output.logprobs = {at: _logprobs(found) for at, found in output.logprobs.items()}
    if output.candidates:
        output.candidates = {
            at: Candidates(*cast("list[Any]", found)) for at, found in output.candidates.items()
        }
    if output.prompt_logprobs:
        output.prompt_logprobs = {
            row: _prompt_logprobs(found) for row, found in output.prompt_logprobs.items()
        }
    return output


def _logprobs(fields: Any) -> TokenLogprobs:
    return TokenLogprobs(*fields)


def _prompt_logprobs(fields: Any) -> PromptLogprobs:
    first_position, entries = fields
    return PromptLogprobs(first_position, [_logprobs(entry) for entry in entries])
