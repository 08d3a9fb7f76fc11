"""Answers of the OpenAI routes are those of the offline engine, whole and streamed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess
from support.servers import LASTING, MODEL_LENGTH
from support.waiting import wait_until

from server.calls import long_request
from server.http.openai_door import TIMEOUT_S, Door, assert_same, mixed, offline
from tpengine import LLM
from tpengine.proto import tpengine_pb2 as pb
from tpengine.server.http.page import FEED

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0.0, "return_token_ids": True}


SINGLE: list[dict[str, Any]] = [
    {"max_tokens": 60, "stop": "Seine"},
    {"max_tokens": 60, "stop": ["Seine"], "include_stop_str_in_output": True},
    {"max_tokens": 60, "stop_token_ids": [1152]},
    {"max_tokens": 6, "echo": True, "logprobs": 2},
    {"max_tokens": 6, "echo": True, "logprobs": 0, "prompt": [[5, 6, 7], [8, 9]]},
    {"max_tokens": 6, "ignore_eos": True, "detokenize": False},
    {"max_tokens": 6, "truncate_prompt_tokens": 3, "echo": True},
    {"max_tokens": 6, "allowed_token_ids": [5, 6, 7], "bad_words": ["zz"]},
    {},
]


def test_mixed_requests_equal_the_offline_engine(door: Door, llm: LLM) -> None:
    requests = mixed(40, seed=3)
    requests += [("completions", {"prompt": PROMPT, **GREEDY, **body}) for body in SINGLE]
    with ThreadPoolExecutor(16) as pool:
        whole = list(pool.map(lambda request: door.whole(*request), requests))
        streamed = list(pool.map(lambda request: door.any_way(*request), requests))
    for (path, body), answer, other in zip(requests, whole, streamed, strict=True):
        wanted = offline(llm, path, body)
        if "truncate_prompt_tokens" in body:
            for output in wanted:  # the echo is of what was read
                output.prompt = None
        assert_same(llm, body, answer, wanted)
        assert_same(llm, body, other, wanted)


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Once"], [5, 6, 7]])
def test_an_echo_of_no_tokens_is_the_prompt_alone(door: Door, llm: LLM, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, **GREEDY}
    for answer in (door.whole("completions", body), door.streamed("completions", body)):
        assert answer["usage"]["completion_tokens"] == 0
        for choice in answer["choices"]:
            ids = choice["prompt_token_ids"]
            assert choice["text"] == llm.get_tokenizer().decode(ids)
            assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert logprobs["token_logprobs"][0] is None
            assert len(logprobs["top_logprobs"]) == len(ids)


def test_prompt_logprobs_and_bytes(door: Door, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Ærø 🙂"}]
    body = {"messages": messages, "max_tokens": 4, "prompt_logprobs": 1, **GREEDY}
    body |= {"logprobs": True, "top_logprobs": 2}
    answer = door.whole("chat/completions", body)
    (wanted,) = offline(llm, "chat/completions", body)
    assert [entry and {int(i) for i in entry} for entry in answer["prompt_logprobs"]] == [
        entry and set(entry) for entry in wanted.prompt_logprobs or ()
    ]
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == wanted.outputs[0].text
    text = llm.get_tokenizer().encode("🙂")  # each token is a part of the character
    body = {"prompt": "🙂", "max_tokens": 1, "allowed_token_ids": text, **GREEDY}
    chat = {**body, "messages": messages, "logprobs": True}
    del chat["prompt"]
    (entry,) = door.whole("chat/completions", chat)["choices"][0]["logprobs"]["content"]
    assert bytes(entry["bytes"]) in "🙂".encode()


def test_forms_of_a_conversation(door: Door, llm: LLM) -> None:
    """Parts, roles that the template lacks, and the template's switches."""

    def ids(messages: list[dict[str, Any]], **fields: Any) -> list[int]:
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
        return door.whole("chat/completions", body)["prompt_token_ids"]

    plain = [{"role": "system", "content": "a\nb"}, {"role": "assistant", "content": ""}]
    wanted = llm.chat_token_ids(plain)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    nulls = {"refusal": None, "tool_calls": [], "audio": None}
    assert ids(plain) == wanted
    assert ids([{"role": "developer", "content": parts}, {"role": "assistant", **nulls}]) == wanted
    assert ids(plain, add_generation_prompt=False) == llm.chat_token_ids(plain, False)
    assert ids(plain, chat_template_kwargs={"enable_thinking": False}) == wanted
    last = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    assert llm.get_tokenizer().decode(ids(last, continue_final_message=True)).endswith("b c")


def test_chunks_of_a_stream(door: Door) -> None:
    """One chunk for each token, the role first; usage only where it is asked for."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0.0}
    plain = list(door.chunks("chat/completions", {**body, "ignore_eos": True}))
    assert all("usage" not in chunk for chunk in plain)
    deltas = [chunk["choices"][0] for chunk in plain]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert [d["finish_reason"] for d in deltas[1:]] == [None] * (len(deltas) - 2) + ["length"]
    assert all(d["delta"].keys() == {"content"} for d in deltas[1:])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream_options": options, "n": 2, "temperature": 1.0, "return_token_ids": True}
    chunks = list(door.chunks("chat/completions", body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"]["completion_tokens"] == sum(
        len(choice.get("token_ids", ())) for chunk in chunks for choice in chunk["choices"]
    )


def test_an_id_of_the_client(door: Door) -> None:
    with door.open("completions", {"prompt": "a", "max_tokens": 1, "request_id": "mine"}) as answer:
        assert answer.headers["x-request-id"] == "mine"
        assert b'"id":"cmpl-mine"' in answer.read()


@pytest.mark.parametrize("own_id", ["same", "a b", "x" * 200, "\u00e9 [=;"])
def test_ids_of_gateways_are_no_keys(server: ServerProcess, door: Door, own_id: str) -> None:
    """Two requests at once have one id, and a third of gRPC."""
    body: dict[str, Any] = {"prompt": [5], "max_tokens": LASTING, "ignore_eos": True}
    header = {"x-request-id": own_id}
    begun = [door.begin("completions", {**body, "stream": True}, **header) for _ in range(2)]
    answers = [connection.getresponse() for connection in begun]
    for answer in answers:
        assert (answer.status, answer.headers["x-request-id"]) == (200, own_id)
        assert json.loads(answer.readline().removeprefix(b"data: "))["id"] == f"cmpl-{own_id}"
    if own_id == "same":
        request = long_request(1, request_id=own_id)
        assert server.stub.Generate(request, timeout=TIMEOUT_S).request_id == own_id
        assert server.stub.Abort(pb.AbortRequest(request_id=own_id), timeout=TIMEOUT_S).aborted
        for answer in answers:
            *_, last = [line for line in answer if line.strip()]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "request_aborted"
    for connection in begun:
        connection.close()
    wait_until(lambda: server.loads().num_open_calls == 0, TIMEOUT_S)
    with door.open("completions", {"prompt": [10**9]}, **header) as refused:
        assert (refused.status, refused.headers["x-request-id"]) == (400, own_id)


@pytest.mark.parametrize(
    ("streams", "num_prompts", "size"), [(True, 3, 0), (False, 1, 0), (True, 1, 300_000)]
)
def test_a_client_that_leaves_frees_its_blocks(
    server: ServerProcess, door: Door, streams: bool, num_prompts: int, size: int
) -> None:
    wait_until(lambda: server.loads().num_open_calls == 0, TIMEOUT_S)
    body: dict[str, Any] = {"prompt": [[5, 6, 7]] * num_prompts, "user": "x" * size}
    body |= {"max_tokens": LASTING, "ignore_eos": True}
    connection = door.begin("completions", {**body, "stream": streams})
    wait_until(lambda: server.loads().num_running == num_prompts, TIMEOUT_S)
    steps = server.loads().num_steps
    connection.close()
    wait_until(lambda: server.loads().num_running == 0, TIMEOUT_S)
    assert server.loads().num_steps - steps < 200
    wait_until(server.is_at_rest, TIMEOUT_S)


def test_a_prompt_that_fails_ends_the_others(server: ServerProcess, door: Door) -> None:
    body = {"prompt": [[5], [5] * (MODEL_LENGTH + 1)], "max_tokens": LASTING, "ignore_eos": True}
    status, error = door.refused("completions", body | {"stream": True})
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    wait_until(lambda: server.loads().num_running == 0, TIMEOUT_S)
    assert server.loads().num_open_calls == 0


def test_a_body_has_the_size_that_the_length_of_the_model_leaves(door: Door) -> None:
    status, error = door.refused("completions", {"prompt": "a" * (700 << 10)})
    assert (status, error["code"]) == (413, "request_too_large")
    assert str((512 << 10) + 64 * MODEL_LENGTH) in error["message"]


COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
COLOUR |= {"required": ["colour"], "additionalProperties": False}
NAMED_COLOUR = {"name": "colour", "strict": True, "schema": COLOUR}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED_COLOUR}},
        {"structured_outputs": {"json": COLOUR}},
        {"structured_outputs": {"regex": r'\{"colour": ?"(red|blue)"\}'}},
        {"structured_outputs": {"choice": ['{"colour":"red"}', '{"colour":"blue"}']}},
        {"structured_outputs": {"grammar": 'root ::= "{\\"colour\\":\\"red\\"}"'}},
    ],
    ids=str,
)
def test_an_answer_is_held(door: Door, fields: dict[str, Any]) -> None:
    """By every form of a constraint, as a stream too, for each choice."""
    for path, base in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Which colour?"}]}),
        ("completions", {"prompt": "It is "}),
    ):
        body = {**base, "max_tokens": 60, "temperature": 1.0, "n": 2, "seed": 4, **fields}
        for answer in (door.whole(path, body), door.streamed(path, body)):
            for choice in answer["choices"]:
                text = choice["message"]["content"] if "message" in choice else choice["text"]
                assert choice["finish_reason"] == "stop"
                assert json.loads(text)["colour"] in ("red", "blue")


def named(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": form}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema or structural"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema", "is missing"),
        ({"response_format": {"type": "text", "a": 1}}, "response_format.a", "not a field"),
        (named({"type": "x"}), "response_format", "Invalid type: x"),
        (named({"properties": []}), "response_format", "properties"),
        (named({"enum": ["a" * 300_000]}), "response_format", "at most 262144"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "structures"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs", "Invalid type: x"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}, "max_tokens": 9},
         "structured_outputs", "(limit step_lexer_fuel of llguidance)"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "at most 262144"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "and response_format are given"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_constraint_not_held(door: Door, fields: dict[str, Any], param: str, words: str) -> None:
    status, error = door.refused("completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert error["param"].endswith(param)
    assert ("structured_outputs" in error["message"]) == ("structured_outputs" in fields)


def test_a_server_that_looks_ahead(llm: LLM, tmp_path: Path) -> None:
    """The second answers are drafted from the first ones; the reports agree about the drafts."""
    options = ["--dtype", "float32", "--cpu-kv-cache-space", "0.05", "--http-port", "0"]
    options += ["--max-model-len", str(MODEL_LENGTH), "--speculative-model", "[suffix]"]
    with ServerProcess(*options, log=tmp_path / "log") as server:
        door = Door(server.http_address)
        for path, body in mixed(16, seed=5) * 2:
            assert_same(llm, body, door.any_way(path, body), offline(llm, path, body))
        answer = server.stub.Generate(long_request(100), timeout=TIMEOUT_S)
        assert answer.usage.num_output_tokens == 100
        engine = json.load(door.open(FEED))["engine"]
        for name, figure in (("num_drafted", "draft"), ("num_accepted", "accepted")):
            metric = f"tpengine:spec_decode_num_{figure}_tokens_total"
            assert engine[name] == server.metric(metric) > 0
