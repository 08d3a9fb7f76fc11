"""Each field of a body is read, accepted, or refused by its name; no body breaks the reader."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from support.costs import count_work
from support.programs import Cli
from support.small_barts import write_bart

from server.http.openai_door import Door, written
from tpengine.async_engine.async_llm_engine import AsyncLLMEngine
from tpengine.engine_args import AsyncEngineArgs
from tpengine.errors import RequestError
from tpengine.inputs import Owner
from tpengine.outputs import CompletionOutput, RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.server.auth import Call, Client
from tpengine.server.http.fields import NO_EFFECT, REFUSED
from tpengine.server.http.read import BodyReader
from tpengine.server.state import ServerState

CHAT, TEXT = "chat/completions", "completions"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    TEXT: {"prompt": "a", "max_tokens": 1},
}
UNKNOWN = "is not a field that this server knows"


@contextmanager
def loaded(**args: Any) -> Iterator[ServerState]:
    args = {"dtype": "float32", "num_device_blocks_override": 64, **args}
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**args))
    state = ServerState(["embedded"], 0.0)
    state.sampling = {"temperature": 0.7, "top_p": 0.9}
    state.serve(engine)
    yield state
    asyncio.run(engine.shutdown())


@pytest.fixture(scope="module")
def state() -> Iterator[ServerState]:
    with loaded(max_model_len=128) as state:
        yield state


def reader(state: ServerState, path: str, body: dict[str, Any]) -> BodyReader:
    return BodyReader(Call("it", Client(Owner("me")), None, body), path == CHAT, state)


def read(state: ServerState, path: str, body: dict[str, Any]) -> Any:
    """What the reader makes of a body, after the engine's own checks."""
    asked = asyncio.run(reader(state, path, body).read())
    for request in asked[0]:
        state.loaded_engine().llm_engine.check_request(request)
    return asked


def refused(state: ServerState, path: str, **body: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        read(state, path, {**BASES[path], **body})
    return caught.value.field, str(caught.value)


def names(table: Any) -> list[str]:
    return [name for key in table for name in key.split()]


def listed(state: ServerState) -> list[str]:
    """All fields that are read, have no effect or are refused by name."""
    readers = [reader(state, path, base) for path, base in BASES.items()]
    for each in readers:
        asyncio.run(each.read())
    return [*names([*NO_EFFECT, *REFUSED]), *(n for each in readers for n in each._fields.known)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_each_field_of_openai_is_decided(state: ServerState, path: str) -> None:
    types = chat_params if path == CHAT else completion_params
    (base,) = (kind for name, kind in vars(types).items() if name == "CompletionCreateParamsBase")
    fields = {*base.__annotations__, "stream"}
    assert len(fields) > 15
    for field in fields:
        _, text = refused(state, path, **{field: {"no": ["such", 1.5]}, "not_a_field": 1})
        assert field in text or text.startswith("not_a_field")
        assert not text.startswith(f"{field} {UNKNOWN}")


def test_the_page_lists_all_fields(state: ServerState) -> None:
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text()
    for name in listed(state):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_refused_field_is_named(state: ServerState, path: str) -> None:
    """By one door, if the other one reads it."""
    of_path = {CHAT: ("top_logprobs", "max_completion_tokens"), TEXT: ("echo",)}[path]
    for field in {*names(REFUSED)} - {*BASES[path], *of_path}:
        at_fault, text = refused(state, path, **{field: "x"})
        assert at_fault == field
        assert field in text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_has_no_effect_is_accepted(state: ServerState, path: str) -> None:
    body: dict[str, Any] = dict(BASES[path])
    for key, values in NO_EFFECT.items():
        body |= dict.fromkeys(key.split(), {"a": [1]} if values is None else values[0])
    body |= {"stream": False, "stream_options": {"include_usage": True}, "n": 1}
    every = [*SamplingParams.__dataclass_fields__, *names(REFUSED), "stream_options", "seed"]
    plain = read(state, path, BASES[path])
    assert read(state, path, body) == plain
    assert read(state, path, dict.fromkeys(every) | BASES[path]) == plain


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"temprature": 1}, "temprature"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, None),
        (TEXT, {"prompt": ["a", 5]}, "prompt[1]"),
        (TEXT, {"prompt": [[5], [10**9]]}, "prompt_token_ids"),
        (TEXT, {"prompt": ["a"] * 300}, "prompt"),
        (TEXT, {"best_of": 3, "stream": True}, "best_of"),
        (TEXT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (TEXT, {"stop": {"a": 1}}, "stop"),
        (TEXT, {"stop": ["a"] * 65}, "stop"),
        (TEXT, {"logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": [1]}, "logit_bias"),
        (TEXT, {"temperature": 10**400}, "temperature"),
        (TEXT, {"stream_options": {"no": 1}}, "stream_options.no"),
        (TEXT, {"request_id": "a b"}, "request_id"),
        (TEXT, {"model": 5}, "model"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
         "messages[0].function_call"),
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (TEXT, {"max_tokens": 8.5}, "max_tokens"),
        (TEXT, {"prompt": [5.5]}, "prompt_token_ids"),
        (CHAT, {"messages": ["a"]}, "messages[0]"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
         "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": {}}]}]},
         "messages[0].content[0].thinking"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"top_logprobs": -1, "logprobs": True, "max_tokens": None}, "top_logprobs"),
        (CHAT, {"add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
         "chat_template_kwargs.chat_template"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (CHAT, {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(
    state: ServerState, path: str, body: dict[str, Any], param: str | None
) -> None:
    at_fault, text = refused(state, path, **body)
    assert at_fault == param
    words = (param or next(iter(body))).rpartition(".")[2]
    assert words in text or path == TEXT or "the prompt has pictures" in text
    if "temprature" in body:
        assert "did you mean temperature?" in text


def test_a_mistake_is_told_what_is_right(door: Door, cli: Cli) -> None:
    for path, body, words in (
        ("/chat/completions", {}, "did you mean /v1/chat/completions?"),
        ("/responses", {}, "base URL ends in /v1"),
        ("/detokenize", {"tokens": [5, 10**9]}, "tokens[1] = 1000000000 "),
        (TEXT, {"messages": []}, "a field of /v1/chat/completions"),
        (CHAT, {"prompt": "a"}, "a field of /v1/completions"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id is missing"),
    ):
        assert words in door.refused(path, body)[1]["message"]
    shown = cli("client", "health", "--target", door.host, code=1).err
    assert "OpenAI's port is not this client's" in shown


def test_a_path_that_is_missing_names_those_that_are_there(door: Door) -> None:
    for path in ("responses", "audio/speech"):
        status, error = door.refused(path, {})
        assert (status, error["code"]) == (404, "unknown_url")
        assert f"POST /v1/{path} is no URL" in error["message"]
        assert all(f"/v1/{name}" in error["message"] for name in (CHAT, TEXT, "models"))
        assert "base URL" not in error["message"]


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
EXTRAS: list[dict[str, Any]] = [
    {"refusal": "no", "annotations": [{"type": "url_citation"}], "audio": None, "tool_calls": []},
    {"id": "msg_1", "reasoning_details": [{"type": "reasoning.text"}], "finish_reason": "stop"},
    {"provider_specific_fields": {"a": [1]}, "x" * 200: {}, "tool_call_id": 5, "m": "m" * 100_000},
    {"content": [{"type": "text", "text": "b", "cache_control": {}, "annotations": []}]},
    {"content": [{"type": "refusal", "refusal": "b"}]},
    {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "b"}]},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
def test_what_servers_write_comes_back_in_a_conversation(
    state: ServerState, extra: dict[str, Any]
) -> None:
    tokenizer = state.loaded_engine().llm_engine.tokenizer
    noisy = [{**SAID[0], "id": "m"}, {**SAID[1], **extra}]
    (got,), (plain,) = (read(state, CHAT, {"messages": said})[0] for said in (noisy, SAID))
    assert tokenizer.render_chat(got.messages) == tokenizer.render_chat(plain.messages)


@pytest.mark.parametrize("other", [{}, {"reasoning": None}, {"reasoning_content": ""}])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "content"])
def test_reasoning_reaches_a_template_by_both_names(
    state: ServerState, name: str, other: dict[str, Any]
) -> None:
    thought: Any = [{"type": "thinking", "thinking": "why"}] if name == "content" else "why"
    said = {"messages": [SAID[0], {**SAID[1], **other, name: thought}]}
    message = read(state, CHAT, said)[0][0].messages[1]
    assert message["reasoning"] == message["reasoning_content"] == "why"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_a_tool_may_have_nothing_to_say(state: ServerState, content: dict[str, Any]) -> None:
    said = {"messages": [*SAID, {"role": "tool", "tool_call_id": "1", **content}]}
    assert read(state, CHAT, said)[0][0].messages[2]["content"] == ""


def test_the_effort_reaches_a_template_that_knows_it(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = state.loaded_engine().llm_engine.tokenizer
    for knows, effort, more, wanted in (
        ("nothing", "high", {}, {}),
        ("reasoning_effort", "xhigh", {}, {"reasoning_effort": "xhigh"}),
        ("enable_thinking", "none", {}, {"enable_thinking": False, "thinking": False}),
        ("thinking", "low", {"thinking": False}, {"thinking": False}),
    ):
        monkeypatch.setattr(tokenizer.hf, "chat_template", f"{{{{ messages }}}}{{# {knows} #}}")
        body = {**BASES[CHAT], "reasoning_effort": effort, "chat_template_kwargs": more}
        options = read(state, CHAT, body)[0][0].chat_options
        assert options == wanted | {"add_generation_prompt": True}


def test_json_has_one_kind_of_number(state: ServerState) -> None:
    for path, body in (
        (TEXT, {"max_tokens": 8, "n": 1, "top_k": 5, "seed": 3, "logprobs": 2, "min_tokens": 1}),
        (TEXT, {"prompt": [[5, 6], [7]], "stop_token_ids": [7], "priority": 0}),
        (CHAT, {"max_completion_tokens": 8, "logprobs": True, "top_logprobs": 2}),
    ):
        text = re.sub(r"(\d+)", r"\1.0", json.dumps(body))
        asked = [read(state, path, BASES[path] | fields) for fields in (body, json.loads(text))]
        assert repr(asked[0]) == repr(asked[1])


def test_defaults(state: ServerState) -> None:
    (text,) = read(state, TEXT, {"prompt": "a"})[0]
    (chat,) = read(state, CHAT, {"messages": BASES[CHAT]["messages"]})[0]
    assert (text.params.max_tokens, chat.params.max_tokens) == (16, None)
    assert text.params.temperature == state.sampling["temperature"]
    beams = read(state, TEXT, {"prompt": "a", "use_beam_search": True, "n": 2})[0][0]
    assert beams.params.temperature == 0.0
    many = {**BASES[CHAT], "max_tokens": None, "logprobs": True, "top_logprobs": 20, "n": 4}
    params = read(state, CHAT, many | {"temperature": 1.0})[0][0].params
    assert params.max_tokens == (1 << 16) // 21 // 4


@pytest.mark.parametrize("field", ["messages", "prompt", "stop", "logit_bias", "metadata", "user"])
def test_long_lists_are_refused_cheaply(state: ServerState, field: str) -> None:
    path = CHAT if field == "messages" else TEXT
    many = json.loads(f"[{','.join(['1'] * 2_000_000)}]")
    value = {str(i): 1 for i in range(100_000)} if field == "logit_bias" else many
    body = {**BASES[path], field: value}
    is_read = field in ("metadata", "user")

    def ask() -> Any:
        return read(state, path, body) if is_read else refused(state, path, **body)

    assert count_work(ask) < 50_000


def test_echo_of_a_model_with_an_encoder(tmp_path: Path) -> None:
    """Its prompt has no log probabilities."""
    with loaded(model=str(write_bart(tmp_path)), skip_tokenizer_init=True) as state:
        body = {"prompt": [5], "logprobs": 1, "max_tokens": 1}
        read(state, TEXT, body)
        with pytest.raises(RequestError, match="echo does not fit logprobs"):
            read(state, TEXT, body | {"echo": True})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_reasoning_has_a_field_of_its_own(size: int) -> None:
    text = "<think>\nwhy < not</think>\n\nbecause < so"

    def output(place: int, piece: str) -> RequestOutput:
        end = "stop" if place + size >= len(text) else None
        completion = CompletionOutput(0, piece, (place,), None, None, end)
        return RequestOutput("it", "", [1, 2], None, [completion], end is not None)

    parts = [output(place, text[place : place + size]) for place in range(0, len(text), size)]
    (whole,), streamed, num_fast = asyncio.run(written(output(len(text), text), parts))
    assert num_fast == max(0, len(parts) - 2), "only the first and last are slow"
    message = dict.fromkeys(("reasoning", "reasoning_content"), "\nwhy < not")
    message["role"] = "assistant"
    assert whole["message"] == message | {"content": "\n\nbecause < so"}
    assert streamed["choices"][0]["message"] == whole["message"]


def test_an_answer_within_the_tags_of_its_prompt(door: Door) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>"}]
    body = {"messages": messages, "max_tokens": 6, "continue_final_message": True}
    body |= {"temperature": 0.0, "ignore_eos": True}
    for answer in (door.whole(CHAT, body), door.streamed(CHAT, body)):
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"]
        assert not message["content"]
