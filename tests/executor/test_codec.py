"""What a rank decodes is what the driver encoded, field by field."""

from __future__ import annotations

import dataclasses
import threading
from array import array
from dataclasses import replace
from typing import Any

import pytest

from tpengine import EngineArgs, messages
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import EngineError
from tpengine.executor import codec
from tpengine.structured.grammars import Vocabulary

RULES = messages.SamplingRules(
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    min_tokens=3,
    logit_bias={3: -1.5, 4: 2.0},
    allowed_token_ids=[1, 2, 3],
    bad_words_token_ids=[[1], [2, 3]],
    logprobs=4,
    prompt_logprobs=2,
    logits_processors=["os.path:join", b"pickled"],
    grammar="start: /a/",
    not_first_token_ids=[6, 7],
)
PLAIN = messages.NewSequence(5, [1], 1, 0, [], messages.SamplingRules(), 0, 0, [])
FULL_STEP = messages.StepInput(
    step=2**40,
    slots=[3, 4, 5],
    num_scheduled_tokens=[1, 1, 60_000],
    new_sequences=[
        messages.NewSequence(
            5, list(range(70_000)), 70_000, 16, [1, 2**31 - 1], RULES, 2**64 - 1, 1, [2]
        ),
        replace(PLAIN, slot=6, seed=-(2**63), num_candidates=4),
        replace(PLAIN, slot=7, adapter_slot=3),
        replace(PLAIN, slot=8, cross=messages.CrossInput(3, [4], [5], b"6")),
    ],
    new_block_ids=[(3, [9, 10]), (4, [])],
    freed_slots=[0, 1],
    token_overrides=[(3, 11)],
    sample_rows=[0, 0],
    sample_slots=[3, 4],
    forks=[messages.Fork(3, 4, 1)],
    replaced_block_ids=[(4, 0, 12)],
    block_moves=messages.BlockMoves([(1, 2)], [], [(3, 4), (5, 6)]),
    adapter_loads=[messages.AdapterLoad(3, bytes(range(224, 256)), "/adapters/ä")],
    drafts=[(3, [7, 70_000])],
    dropped_pictures=[bytes(range(32))],
    picture_loads=[messages.PictureLoad(bytes(range(32, 64)), 4, 2, 3, bytes(range(18)))],
    computed_pictures=[bytes(range(64, 96))],
    num_awaited_rows=70_000,
)
FULL_OUTPUT = messages.StepOutput(
    step=3,
    token_ids=[5, 6],
    logprobs={1: messages.TokenLogprobs(-0.5, 1, [6, 7], [-0.5, float("-inf")])},
    model_s=0.25,
    waited_s=0.125,
    candidates={0: messages.Candidates([1, 2], [-1.0, -2.0], [-1.0, -2.5])},
    prompt_logprobs={2: messages.PromptLogprobs(1, [messages.TokenLogprobs(-0.1, 2, [1], [-0.1])])},
    errors={1: messages.RowError("every token is banned ✗", "bad_words")},
    load_results={bytes(range(224, 256)): "its rank is 65", bytes(range(32)): None},
    rejected=[1],
    forced={0: [8, 9]},
    behind=[5],
    pooled={1: bytes(range(8))},
    chosen_logprobs=array("f", [-0.1, float("-inf")]),
)


@pytest.mark.parametrize(
    "message", [FULL_STEP, FULL_OUTPUT, RULES], ids=["step", "output", "rules"]
)
def test_examples_leave_no_field_at_its_default(message: Any) -> None:
    for field in dataclasses.fields(message):
        assert getattr(message, field.name), f"{field.name} is empty, so that losing it is not seen"


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (FULL_STEP, codec.decode_step),
        (messages.StepInput(1, [], []), codec.decode_step),
        (FULL_OUTPUT, codec.decode_output),
        (messages.StepOutput(1, []), codec.decode_output),
    ],
    ids=["step", "empty step", "output", "empty output"],
)
def test_a_message_survives(message: Any, decode: Any) -> None:
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


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", codec.encode(FULL_STEP)[:-1]])
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
