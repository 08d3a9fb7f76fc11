"""OpenAI clients of other projects, unchanged; those that are not installed here each in an
environment and process of their own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from support import third_party, tool_models
from support.programs import run_program
from support.server_process import ServerProcess, serving

from tpengine import LLM, SamplingParams
from tpengine.config import EMBEDDED_MODEL

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]
KEY, MODEL = "sk-0123456789abcdef", "embedded"
PROMPT, NUM_TOKENS = "Once upon a time", 12
NUM_LOAD, STREAMS, LOAD_TOKENS, CROWD = 24, 8, 10, 48
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}
COMPLETION = {**GREEDY, "prompt": PROMPT}
CHAT = {**GREEDY, "messages": [{"role": "user", "content": PROMPT}]}


@pytest.fixture(scope="module")
def answers(llm: LLM) -> dict[str, Any]:
    """Texts of the offline engine, for the prompt as it is and as a message; tokens of that one."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    (text,) = llm.generate(PROMPT, params, use_tqdm=False)
    (chat,) = llm.chat(CHAT["messages"], params, use_tqdm=False)
    texts = {"text": text.outputs[0].text, "chat": chat.outputs[0].text}
    return {**texts, "num_chat_tokens": len(chat.outputs[0].token_ids)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and a short queue."""
    options = ["--dtype", "float32", "--num-device-blocks-override", "512", "--http-port", "0"]
    options += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-queued-requests", "8"]
    options += ["--served-model-name", MODEL, "--api-key", KEY]
    with serving(tmp_path_factory.mktemp("clients"), *options) as process:
        yield process


def _run(*command: str | Path, **environment: str) -> str:
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return run_program(*command, env={**clean, **environment}).stdout


def _client(server: ServerProcess) -> openai.OpenAI:
    base_url = f"{server.http_address}/v1"
    return openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=60)


def test_openai(server: ServerProcess, answers: dict[str, Any]) -> None:
    client = _client(server)
    assert [m.id for m in client.models.list()] == [client.models.retrieve(MODEL).id] == [MODEL]
    whole = client.completions.create(**COMPLETION)
    usage: Any = {"include_usage": True}
    *parts, last = client.completions.create(**COMPLETION, stream=True, stream_options=usage)
    texts = [whole.choices[0].text, "".join(part.choices[0].text for part in parts)]
    assert texts == [answers["text"]] * 2
    assert whole.usage == last.usage
    assert whole.usage.completion_tokens == NUM_TOKENS
    assert whole._request_id
    assert [part.choices[0].finish_reason for part in (whole, parts[-1])] == ["length", "length"]

    first = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0]
    tokens = first.logprobs.content
    spelled = bytes(byte for token in tokens for byte in token.bytes).decode()
    assert spelled.startswith(answers["chat"])
    assert {len(token.top_logprobs) for token in tokens} == {2}
    second = client.chat.completions.create(**CHAT, seed=7, stop=["\n\n\n"], user="me").choices[0]
    with client.chat.completions.stream(**CHAT) as events:
        assert {"chunk", "content.delta", "content.done"} <= {event.type for event in events}
        streamed = events.get_final_completion().choices[0]
    assert {choice.message.content for choice in (first, second, streamed)} == {answers["chat"]}


async def test_openai_at_once(server: ServerProcess, answers: dict[str, Any]) -> None:
    """Eight streams at once; a crowd that finds the queue full, without and with retries: the
    package waits as long as Retry-After says, and asks again."""

    async def stream(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def crowd(client: openai.AsyncOpenAI, retries: int) -> set[str]:
        patient = client.with_options(max_retries=retries)
        long = {**COMPLETION, "max_tokens": 100}
        calls = [patient.completions.create(**long) for _ in range(CROWD)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        return {type(end).__name__ for end in ends}

    base_url = f"{server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        texts = await asyncio.gather(*[stream(client) for _ in range(STREAMS)])
        assert set(texts) == {answers["chat"]}
        assert await crowd(client, 0) == {"Completion", "RateLimitError"}
        assert await crowd(client, 30) == {"Completion"}


@pytest.mark.parametrize(
    ("call", "kind", "code", "param"),
    [
        (lambda c: c.with_options(api_key="sk-of-another").models.list(),
         openai.AuthenticationError, "invalid_api_key", None),
        (lambda c: c.completions.create(model="absent", prompt=PROMPT),
         openai.NotFoundError, "model_not_found", "model"),
        (lambda c: c.completions.create(**{**COMPLETION, "temperature": -1.0}),
         openai.BadRequestError, None, "temperature"),
        (lambda c: c.completions.create(**{**COMPLETION, "temperature": -1.0}, stream=True),
         openai.BadRequestError, None, "temperature"),
        (lambda c: c.completions.create(**COMPLETION, suffix="the end"),
         openai.BadRequestError, None, "suffix"),
        (lambda c: c.completions.create(model=MODEL, prompt=[5] * 5000),
         openai.BadRequestError, "context_length_exceeded", "prompt"),
        (lambda c: c.chat.completions.create(model=MODEL, messages=[]),
         openai.BadRequestError, None, "messages"),
        (lambda c: c.embeddings.create(model=MODEL, input=PROMPT),
         openai.BadRequestError, "wrong_endpoint", None),
    ],
)  # fmt: skip
def test_exceptions_of_openai(
    server: ServerProcess, call: Any, kind: type[openai.APIStatusError], code: Any, param: Any
) -> None:
    with pytest.raises(kind) as raised:
        call(_client(server))
    assert raised.value.request_id
    assert (raised.value.code, raised.value.param) == (code, param)


def test_litellm(server: ServerProcess, answers: dict[str, Any]) -> None:
    python = third_party.programs("litellm", "litellm>=1.60") / "python"
    words = (server.http_address, KEY, MODEL, PROMPT, str(NUM_TOKENS))
    script = Path(__file__).with_name("litellm_client.py")
    shown = _run(python, "-I", script, *words, LITELLM_LOCAL_MODEL_COST_MAP="True")
    facts: dict[str, Any] = json.loads(shown.splitlines()[-1])
    assert (set(facts["chats"]), set(facts["texts"])) == ({answers["chat"]}, {answers["text"]})
    assert facts["errors"] == {
        "key": "AuthenticationError",
        "model": "NotFoundError",
        "length": "ContextWindowExceededError",
        "size": "ContextWindowExceededError",
        "temperature": "BadRequestError",
    }


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key, and a random model that knows tools."""
    folder = tmp_path_factory.mktemp("tools")
    options = ["--model", str(tool_models.write(folder, "hermes")), "--dtype", "float32"]
    options += ["--http-port", "0", "--cpu-kv-cache-space", "0.05", "--max-model-len", "4096"]
    options += ["--served-model-name", MODEL, "--api-key", KEY]
    with serving(folder, *options) as process:
        yield process


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    days: list[Literal["today", "tomorrow"]] = Field(max_length=2)


def _plain(message: Any) -> list[tuple[str, str]]:
    """A message's calls, without their ids."""
    assert message.content is None
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def test_tools_of_openai(tool_server: ServerProcess) -> None:
    chats = _client(tool_server).chat.completions
    tool: Any = openai.pydantic_function_tool(Weather)
    strict_tool: Any = openai.pydantic_function_tool(Weather)
    tool["function"].pop("strict")
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Rain?"}]}
    asked |= {"temperature": 1, "max_tokens": 300, "seed": 3}
    held = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    whole = chats.create(**held).choices[0]
    ((name, arguments),) = _plain(whole.message)
    assert name == "Weather"
    with chats.stream(**held) as events:
        assert "tool_calls.function.arguments.done" in {event.type for event in events}
        streamed = events.get_final_completion().choices[0]
    assert _plain(streamed.message) == _plain(whole.message)
    assert [choice.finish_reason for choice in (whole, streamed)] == ["tool_calls"] * 2
    deltas = [chunk.choices[0].delta for chunk in chats.create(**held, stream=True)]
    pieces = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert pieces[0].name == name
    assert "".join(piece.arguments for piece in pieces) == arguments

    strict = {**held, "tools": [strict_tool]}
    (parsed,) = chats.parse(**strict).choices[0].message.tool_calls
    with chats.stream(**strict) as events:
        (last,) = events.get_final_completion().choices[0].message.tool_calls
    values = [call.function.parsed_arguments.model_dump() for call in (parsed, last)]
    assert values == [json.loads(arguments)] * 2
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "wet"}
    talk = {**held, "messages": [*asked["messages"], whole.message, result]}
    assert chats.create(**talk).choices[0].finish_reason == "tool_calls"
    form = chats.parse(**asked, response_format=Weather).choices[0].message.parsed
    assert set(form.model_dump()) == {"city", "days"}


def test_guidellm_fails_no_request(server: ServerProcess, tmp_path: Path) -> None:
    """It is told to see the packages of this environment, or it would fetch torch for CUDA."""
    guidellm = third_party.programs("guidellm", "guidellm>=0.8", beside_ours=True) / "guidellm"
    backend = f"kind=openai_http,target={server.http_address},api_key={KEY}"
    data = f"kind=synthetic_text,prompt_tokens=20,output_tokens={LOAD_TOKENS}"
    report = tmp_path / "report.json"
    _run(
        *(guidellm, "run", "--disable-console", "--backend", backend, "--data", data),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={NUM_LOAD}"),
        *("--tokenizer", f"kind=hf_auto,model={EMBEDDED_MODEL}"),
        *("--output", f"kind=json,path={report}"),
        GUIDELLM__MAX_WORKER_PROCESSES="1",
        HF_HUB_OFFLINE="1",
    )
    (run,) = json.loads(report.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_LOAD, 0)
    assert run["metrics"]["output_token_count"]["successful"]["total_sum"] == NUM_LOAD * LOAD_TOKENS
