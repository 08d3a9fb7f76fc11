"""What a rank decodes is what the driver encoded, field by field."""

from __future__ import annotations

import dataclasses
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.random_runs import SAME_EXAMPLES

from tpengine import EngineArgs, messages
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import EngineError
from tpengine.executor import codec
from tpengine.structured.grammars import Vocabulary

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bytes: st.binary(),
    str: st.text("a\0ä✗\udcff"),  # paths that are no UTF-8 have lone surrogates
    type(None): st.none(),
}
OF_PARTS: dict[Any, Any] = {
    UnionType: st.one_of,
    tuple: st.tuples,
    list: partial(st.lists, max_size=2),
    **dict.fromkeys((dict, Mapping), partial(st.dictionaries, max_size=2)),
    deque: lambda _: st.lists(st.floats(width=32, allow_nan=False)).map(partial(array, "f")),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Of the type of a message or of a field; all fields of an object have values of their own."""
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind, localns={"array": deque})  # 3.11 knows no `array[float]`
        return st.builds(kind, **{name: values(own) for name, own in fields.items()})
    origin = get_origin(kind)
    if origin is None or origin is Callable:
        return st.nothing() if origin else PLAIN[kind]  # functions are pickled before
    return OF_PARTS[origin](*map(values, get_args(kind)))


@pytest.mark.parametrize(
    ("kind", "decode"),
    [(messages.StepInput, codec.decode_step), (messages.StepOutput, codec.decode_output)],
)
@settings(SAME_EXAMPLES, max_examples=30, phases=[Phase.generate])  # to shrink one takes minutes
@given(data=st.data())
def test_a_message_survives(kind: Any, decode: Any, data: Any) -> None:
    message = data.draw(values(kind))
    decoded = decode(codec.encode(message))
    assert decoded == message
    assert repr(decoded) == repr(message)  # also tells a tuple from a list


@pytest.mark.parametrize("num_rows", [1, 256, 300, 1500])
@pytest.mark.parametrize("change", ["none", "slots", "tokens", "rows", "fewer rows", "own slots"])
def test_steps_of_decodes_survive(num_rows: int, change: str) -> None:
    """What most steps are like travels in short forms, and so does not what is only similar."""
    rows = list(range(num_rows))
    sampled = {"sample_rows": rows, "sample_slots": rows.copy()}
    step = messages.StepInput(1, rows.copy(), [1] * num_rows, **sampled)
    if change == "slots":
        step.slots = [slot + 100 for slot in rows]
    elif change == "tokens":
        step.num_scheduled_tokens[-1] = 2
    elif change == "rows":
        step.sample_rows = rows[::-1]
    elif change == "fewer rows":
        step.sample_rows, step.sample_slots = rows[:-1], rows[:-1]
    elif change == "own slots":
        step.sample_slots[0] = 77
    decoded = codec.decode_step(codec.encode(step))
    assert decoded == step
    lists = [decoded.slots, decoded.num_scheduled_tokens, decoded.sample_rows, decoded.sample_slots]
    assert len(set(map(id, lists))) == 4, "changing one would change another"


@pytest.mark.parametrize("ids", [[], [0], [2**32 - 1, 5], [2**32], [-1, 7]])
def test_any_token_ids_survive(ids: list[int]) -> None:
    assert codec.decode_output(codec.encode(messages.StepOutput(1, ids))).token_ids == ids


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\x01", codec.encode(messages.StepInput(1, [], []))[:-1]]
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(EngineError, match="cannot be decoded"):
        codec.decode_plain(data)


def test_another_versions_message_is_refused() -> None:
    with pytest.raises(EngineError, match="same version"):
        codec.decode_step(
            codec.encode((1, [], [], [], [], [], [], [], [], [], [], [[], [], []], [], "new field"))
        )
    with pytest.raises(EngineError, match="same version"):
        codec.decode_output(codec.encode((1,)))


def test_calls_survive() -> None:
    """With their classes, and tuples as tuples. The fields of a model stay readable by name."""
    args = EngineArgs(EMBEDDED_MODEL, tensor_parallel_size=2, executor="ray", device="cpu")
    engine_config = args.create_engine_config("cpu")
    ledgers = [messages.MemoryLedger(0, "cpu", *[1] * 6)]
    call = ("create", (engine_config, ledgers), {"sizes": {"a": (1, 2)}})
    decoded = codec.decode_call(codec.encode_call(call))
    assert decoded == call
    assert repr(decoded) == repr(call)
    assert decoded[1][0].model.hf_config.hidden_size > 0
    vocabulary = codec.decode_call(codec.encode_call(Vocabulary("{}", 5, [2])))
    assert (vocabulary.size, vocabulary.end_token_ids) == (5, [2])
    with pytest.raises(EngineError, match="same version"):
        codec.decode_call(codec.encode_call(call).replace(b"MemoryLedger", b"MemoryLodger"))


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="Thread is no plain data"):
        codec.encode_call(("method", (threading.Thread(),), {}))
    with pytest.raises(TypeError, match="object is no plain data"):
        codec.encode(messages.StepOutput(1, [object()]))  # type: ignore[list-item]
