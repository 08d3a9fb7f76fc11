"""Tools over HTTP: fields, conversations with calls, answers held to a choice, and streams."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.server_process import serving
from support.tool_models import write

from server.http.openai_door import Door, written
from server.http.test_openai_fields import CHAT, loaded, read, refused
from tpengine import CompletionOutput, RequestOutput
from tpengine.server.http.tool_formats import FORMATS
from tpengine.server.http.tools import Tools
from tpengine.server.state import ServerState

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Day": {"enum": ["today", "tomorrow"]}},
}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, **fields}}


TOOLS = [tool("get_weather", description="The weather."), tool("get-rain")]
NAMED = {"type": "function", "function": {"name": "get-rain"}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Rain?"}], "tools": TOOLS}
SAMPLED = {**ASKED, "temperature": 1.0, "max_tokens": 400, "return_token_ids": True}
RAIN = {"name": "get-rain", "arguments": '{"city": "Ærø"}'}
CALL = {"id": "abcdefghi", "type": "function", "function": RAIN}
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(2000), dict[str, Any]())
ENDLESS = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DONE = [
    *ASKED["messages"],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "<wet>"},
]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get-rain", "arguments": {"city": "Ærø"}}\n</tool_call>',
    "llama3": '{"name": "get-rain", "parameters": {"city": "Ærø"}}',
    "mistral": '[TOOL_CALLS][{"name": "get-rain", "arguments": {"city": "Ærø"}}]',
    "mistral 2025": '[TOOL_CALLS]get-rain[ARGS]{"city": "Ærø"}',
}


@pytest.fixture(
    name="form",
    scope="module",
    params=[
        pytest.param(name, marks=[] if name == "llama3" else pytest.mark.soak) for name in WRITTEN
    ],
)
def form_fixture(request: pytest.FixtureRequest) -> str:
    return request.param


@contextmanager
def served(folder: Path, form: str) -> Iterator[Door]:
    """A server of a random model that knows tools in one form."""
    options = ["--model", str(write(folder, form)), "--dtype", "float32", "--http-port", "0"]
    options += ["--cpu-kv-cache-space", "0.05", "--max-model-len", "4096"]
    with serving(folder, *options) as process:
        yield Door(process.http_address)


@pytest.fixture(name="tooled", scope="module")
def tooled_fixture(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with served(tmp_path_factory.mktemp("tools"), form) as door:
        yield door


@pytest.fixture(name="state", scope="module")
def state_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerState]:
    folder = write(tmp_path_factory.mktemp("tools"), "hermes")
    with loaded(model=str(folder), num_device_blocks_override=256, max_model_len=4096) as state:
        yield state


def check_calls(message: dict[str, Any], names: set[str], form: str) -> None:
    """The message has calls alone, which follow the schema."""
    assert not message["content"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER)
        assert len(call["id"]) == (9 if form.startswith("mistral") else len("call_") + 32)


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"get_weather", "get-rain"}), (NAMED, {"get-rain"})]
)
def test_a_choice_is_held(tooled: Door, form: str, choice: Any, names: set[str]) -> None:
    body = {**SAMPLED, "tool_choice": choice, "parallel_tool_calls": False, "n": 3}
    for seed in range(2):
        whole = tooled.whole(CHAT, {**body, "seed": seed})
        streamed = tooled.streamed(CHAT, {**body, "seed": seed})
        pairs = list(zip(whole["choices"], streamed["choices"], strict=True))
        assert [a["token_ids"] for a, _ in pairs] == [b["token_ids"] for _, b in pairs]
        for pair in pairs:
            for answer in pair:
                assert answer["finish_reason"] == "tool_calls"
                check_calls(answer["message"], names, form)
            functions = [[call["function"] for call in a["message"]["tool_calls"]] for a in pair]
            assert functions[0] == functions[1]
            assert len(functions[0]) == 1


def test_a_choice_is_held_after_a_thought(tmp_path: Path) -> None:
    with served(tmp_path, "thinking") as door:
        asked = {"prompt": "</think>", "add_special_tokens": False}
        (closing,) = door.whole("/tokenize", asked)["tokens"]
        body = {**SAMPLED, "tool_choice": NAMED, "parallel_tool_calls": False, "seed": 1}
        body["logit_bias"] = {str(closing): 5.0}  # thoughts end by themselves, and are not long
        for answered in (door.whole, door.streamed):
            (choice,) = answered(CHAT, body)["choices"]
            assert len(choice["message"]["reasoning_content"]) > 1
            assert choice["finish_reason"] == "tool_calls"
            check_calls(choice["message"], {"get-rain"}, "thinking")


def test_several_calls_or_a_part(tooled: Door, form: str) -> None:
    numbers = []
    for seed in range(4):
        body = {**SAMPLED, "tool_choice": "required", "seed": seed}
        (choice,) = tooled.whole(CHAT, body)["choices"]
        if choice["finish_reason"] == "tool_calls":
            check_calls(choice["message"], {"get_weather", "get-rain"}, form)
            numbers.append(len(choice["message"]["tool_calls"]))
    assert numbers
    assert max(numbers) == 1 or form != "llama3"
    (choice,) = tooled.whole(CHAT, {**SAMPLED, "tool_choice": NAMED, "max_tokens": 3})["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("length", False)
    assert choice["message"]["content"]


def test_a_conversation_with_calls(tooled: Door, form: str) -> None:
    text = tooled_text(tooled, {"messages": DONE, "tools": TOOLS})
    assert '{"type": "function", "function": {"name": "get_weather", ' in text
    assert "The weather." in text
    assert f"A: {WRITTEN[form]}" in text.replace("A: \n", "A: ")
    assert "<wet>" in text
    text = tooled_text(tooled, {"messages": DONE, "tools": TOOLS, "tool_choice": "none"})
    assert "get_weather" not in text
    broken = {**CALL, "function": {**RAIN, "arguments": "{"}}
    messages = [DONE[0], {**DONE[1], "tool_calls": [broken]}, DONE[2]]
    assert tooled_text(tooled, {"messages": messages})


def tooled_text(door: Door, body: dict[str, Any]) -> str:
    """The prompt that the template makes of a body."""
    tokens = door.whole("/tokenize", body)["tokens"]
    return str(door.whole("/detokenize", {"tokens": tokens})["prompt"])


def test_text_without_a_call_is_the_answer(tooled: Door) -> None:
    """The random model writes no call, also under the grammar that would hold it to one."""
    strict = {"tools": [tool("get-rain", strict=True)], "parallel_tool_calls": False}
    for more in ({}, strict):
        (got,) = tooled.streamed(CHAT, {**SAMPLED, "max_tokens": 30, "seed": 5, **more})["choices"]
        assert got["message"].keys() == {"role", "content"}
        assert got["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("f"), tool("a b")]}, "tools[1].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("f", strict="x")]}, "tools[0].function.strict"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("f", parameters=DEEP)]}, "tools"),
        ({"tools": [tool("f", parameters={"properties": {"a": {"enum": ["b" * 140_000]}}})],
          "tool_choice": "required", "n": 2}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tools"),
        ({"structured_outputs": {"regex": "a"}}, "tools"),
        ({"detokenize": False}, "detokenize"),
        ({"functions": [{}]}, "functions"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": None}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "custom": {}}]}]},
         "messages[0].tool_calls[0].custom"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
         "messages[0].tool_calls[0].function.name"),
    ],
)  # fmt: skip
def test_what_is_refused(state: ServerState, body: dict[str, Any], param: str) -> None:
    at_fault, text = refused(state, CHAT, **{**ASKED, **body})
    assert at_fault == param
    assert text.startswith(param)


def test_choices_that_hold_nothing(state: ServerState) -> None:
    ((free,), style) = read(state, CHAT, ASKED)
    assert free.params.structured_outputs is None
    assert style.tools.names == ["get_weather", "get-rain"]
    asked = {**ASKED, "response_format": {"type": "json_object"}}
    for more in ({"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
        ((request,), style) = read(state, CHAT, {**asked, **more})
        assert (style.tools, "tools" in request.chat_options) == (None, False)


def test_a_template_without_tools(door: Door) -> None:
    status, error = door.refused(CHAT, ASKED)
    assert (status, error["param"]) == (400, "tools")
    assert "chat template does not read tools" in error["message"]
    assert all(form.description in error["message"] for form in FORMATS[:2])
    assert door.refused(CHAT, {"messages": DONE})[1]["param"] == "messages[1].tool_calls"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_an_answer_with_a_thought_and_calls(size: int) -> None:
    """Of two choices, one is cut within its call."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é\\n"}}\n</tool_call>'
    text = f"<think>why</think>\n\nWell. {call}\n{call}"

    def output(low: int, high: int) -> RequestOutput:
        ends = [("stop", len(text)), ("length", text.index("é"))]
        outputs = [
            CompletionOutput(i, text[low : min(high, end)], (1,), None, None, reason)
            for i, (why, end) in enumerate(ends)
            if (reason := why if high >= end else None) is None or low < end
        ]
        return RequestOutput("it", "", [1, 2], None, outputs, high >= len(text))

    parts = [output(low, low + size) for low in range(0, len(text), size)]
    tools = Tools([], ["f"], FORMATS[0], [], None)
    whole, streamed, _ = asyncio.run(written(output(0, len(text)), parts, tools))
    for part, wanted in zip(streamed["choices"], whole, strict=True):
        for choice in (part, wanted):
            for called in choice["message"]["tool_calls"]:
                assert len(called.pop("id")) == len("call_") + 32
        assert part["message"] == wanted["message"]
        assert part["finish_reason"] == wanted["finish_reason"]
        assert wanted["message"]["reasoning_content"] == "why"
        assert wanted["message"]["reasoning"] == "why"
        assert wanted["message"]["content"] == "\n\nWell. "
    assert [choice["finish_reason"] for choice in whole] == ["tool_calls", "length"]
    assert [len(choice["message"]["tool_calls"]) for choice in whole] == [2, 1]
    assert whole[1]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "'


def test_a_schema_that_no_grammar_holds(tooled: Door) -> None:
    strict = tool("f", strict=True, parameters={"not": {"minProperties": 2}})
    status, error = tooled.refused(CHAT, {**ASKED, "tools": [TOOLS[0], strict, TOOLS[1]]})
    assert (status, error["param"]) == (400, "tools[1].function.parameters")
    assert error["message"].endswith('cannot be held by a grammar: Unimplemented keys: ["not"]')
    endless = tool("f", strict=True, parameters=ENDLESS)
    error = tooled.refused(CHAT, {**ASKED, "tools": [TOOLS[0], endless]})[1]
    assert error["param"] == "tools[1].function.parameters"
    assert "no finite value" in error["message"]


def test_extras_in_tools_and_calls_change_nothing(state: ServerState) -> None:
    extras = {"strict": True, "cache_control": {"type": "ephemeral"}, "x": [1]}
    noisy = [
        {**entry, **extras, "function": {**entry["function"], "example": 1, "strict": None}}
        for entry in TOOLS
    ]
    function = {**RAIN, "parsed_arguments": {"a": 1}, "output": None}
    calls = [{**CALL, "index": 0.5, "extra_content": {"x": 1}, "function": function}]
    messages = [DONE[0], {**DONE[1], "tool_calls": calls, "refusal": None}, {**DONE[2], "id": 1}]
    wanted = read(state, CHAT, {"messages": DONE, "tools": TOOLS})
    assert read(state, CHAT, {"messages": messages, "tools": noisy}) == wanted


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"description": "d", "strict": True}])
def test_a_function_without_parameters_takes_none(tooled: Door, more: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", **more}}]
    body = {**SAMPLED, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = tooled.whole(CHAT, body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
