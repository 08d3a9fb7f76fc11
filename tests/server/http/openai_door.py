"""A plain client of the OpenAI routes, whose answers must have the types of the `openai` package;
and mixed requests, whose answers must be those of the offline engine."""

from __future__ import annotations

import http.client
import json
import random
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tpengine import LLM, RequestOutput, SamplingParams
from tpengine.server.http.json_text import event, json_bytes
from tpengine.server.http.tools import Tools
from tpengine.server.http.write import AnswerWriter, Style, usage
from tpengine.server.stream_sender import has_only_tokens

TIMEOUT_S = 120.0
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "Der Fluß fließt über Ærø: 東京 🙂",
    [5, 6, 7],
    ["Two plus three is", "Hello, my name is"],
    [[5, 6, 7, 8], [9, 10]],
]
QUESTIONS = ["What is two plus three?", "Tell me a story.", "Wie heißt die Hauptstadt von Ærø?"]


class Door:
    """Calls the routes at `http://HOST:PORT`; each call has a connection of its own.

    Args:
        token: of the client; empty: it has none.
        tls: for a server that has a certificate.
    """

    def __init__(self, address: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.host = urlsplit(address).netloc
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._connect = partial(http.client.HTTPSConnection, context=tls) if tls else None

    def begin(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        """Sends a body to a path of the server, or without / to one below /v1, and does not wait
        for the answer; a client leaves by closing this. Without a body it is a GET."""
        connect = self._connect or http.client.HTTPConnection
        connection = connect(self.host, timeout=TIMEOUT_S)
        data = body if isinstance(body, bytes) else json.dumps(body)
        url = path if path.startswith("/") else f"/v1/{path}"
        sent = {"content-type": "application/json", **self._headers, **headers}
        connection.request("GET" if body is None else "POST", url, data, sent)
        return connection

    def open(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """The answer to a body, or to a GET."""
        return self.begin(path, body, **headers).getresponse()

    def refused(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a call that must fail before its first byte."""
        with self.open(path, body) as answer:
            assert answer.status >= 400, answer.read()[:500]
            return answer.status, json.load(answer)["error"]

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece; that of a path with / may have any fields."""
        with self.open(path, body) as answer:
            text = answer.read()
            assert answer.status == 200, text
        fields: dict[str, Any] = json.loads(text)
        # The package forgets that the first position of an echo has no probability.
        if not path.startswith("/") and not body.get("echo"):
            (ChatCompletion if path.startswith("chat") else Completion).model_validate(fields)
        return fields

    def chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a stream, as they come."""
        kind = ChatCompletionChunk if path.startswith("chat") else Completion
        with self.open(path, {**body, "stream": True}) as answer:
            assert answer.status == 200, answer.read()
            ended = False
            for line in answer:
                if line.strip():
                    assert not ended, "a chunk after the last"
                    ended = line == b"data: [DONE]\n"
                    if not ended:
                        chunk = json.loads(line.removeprefix(b"data: "))
                        assert "error" not in chunk, chunk
                        _check_chunk(kind, chunk, body)
                        yield chunk
            assert ended

    def any_way(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, as a stream if that is possible."""
        return (self.whole if "best_of" in body else self.streamed)(path, body)

    def streamed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer that the chunks of a stream make together."""
        options = {"stream_options": {"include_usage": True}}
        return joined(list(self.chunks(path, {**body, **options})))


def _check_chunk(kind: Any, chunk: dict[str, Any], body: dict[str, Any]) -> None:
    """Checks the type; for completions the package has none of a choice that goes on, or of an
    echo."""
    if kind is not Completion:
        kind.model_validate(chunk)
    elif not body.get("echo"):
        ends = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in chunk["choices"]]
        kind.model_validate({**chunk, "choices": ends})


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the chunks of a stream into the form of a whole answer."""
    whole: dict[str, Any] = {"choices": {}}
    for place, chunk in enumerate(chunks):
        is_last = place == len(chunks) - 1
        assert (chunk["choices"] == [], chunk["usage"] is not None) == (is_last, is_last)
        whole |= {name: value for name, value in chunk.items() if name != "choices"}
        for delta in chunk["choices"]:
            known = whole["choices"].setdefault(delta["index"], {})
            assert known.get("finish_reason") is None, "a choice goes on after its end"
            _add(known, delta)
    whole["choices"] = [choice for _, choice in sorted(whole["choices"].items())]
    whole["object"] = whole["object"].removesuffix(".chunk")
    return whole


def _add(known: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        name = "message" if name == "delta" else name
        old = known.get(name)
        if name == "tool_calls":
            _add_calls(known.setdefault(name, []), value)
        elif name == "role" or old is None or value is None or name == "index":
            known[name] = old if value is None else value
        elif isinstance(value, dict):
            _add(old, value)
        else:
            known[name] = old + value


def _add_calls(known: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    """Adds to calls by their index; the first delta of each has its id and its name."""
    for delta in deltas:
        begins = delta.pop("index") == len(known)
        assert begins == ("id" in delta) == ("name" in delta["function"])
        if begins:
            known.append(delta)
        else:
            assert delta.keys() == {"function"}
            known[-1]["function"]["arguments"] += delta["function"]["arguments"]


async def written(
    whole: RequestOutput, parts: list[RequestOutput], tools: Tools | None = None
) -> tuple[list[Any], dict[str, Any], int]:
    """The choices that the writer makes of an output, the answer that the chunks of its parts make
    together, and how many parts took the fast way."""
    styles = Style(True, tools=tools), Style(True, streams=True, usage=True, tools=tools)
    choices, _ = await AnswerWriter(styles[0], styles[0].head("it", 1, "m")).write_whole(whole)
    head = styles[1].head("it", 1, "m")
    writer, sent, num_fast = AnswerWriter(styles[1], head), b"", 0
    for part in parts:
        tokens = writer.write_tokens(part) if has_only_tokens(part) else None
        num_fast += tokens is not None
        sent += tokens or await writer.write(part)
    sent += event({**head, "choices": [], "usage": usage([writer])})
    chunks = [json.loads(chunk[6:]) for chunk in sent.split(b"\n\n")[:-1]]
    assert all("<think>" not in str(chunk) for chunk in chunks)
    return json.loads(json_bytes(choices)), joined(chunks), num_fast


def mixed(count: int, seed: int, max_tokens: int = 24) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of requests of all kinds, each with one right answer. Those with `best_of`
    cannot be streamed."""
    rng = random.Random(seed)
    bodies = []
    for _ in range(count):
        body: dict[str, Any] = {"temperature": 0.0, "return_token_ids": True}
        body["max_tokens"] = rng.randint(1, max_tokens)
        is_chat = rng.random() < 0.4
        kind = rng.random()
        if kind < 0.4:
            body |= {"temperature": 0.9, "seed": rng.randrange(1000), "top_k": rng.choice([0, 40])}
            body |= {"n": rng.randint(1, 3), "presence_penalty": 0.5, "min_p": 0.02}
            body["top_p"] = 0.95
        elif kind < 0.5:
            body |= {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.9}
        else:
            body |= {"repetition_penalty": 1.2, "logit_bias": {"20": -5.0}, "min_tokens": 1}
            body |= rng.choice([{}, {"stop": ["e", "zz"]}, {"stop_token_ids": [13, 21]}])
        if is_chat:
            body["messages"] = [{"role": "user", "content": rng.choice(QUESTIONS)}]
            body |= rng.choice([{}, {"logprobs": True, "top_logprobs": rng.randint(0, 3)}])
        else:
            body["prompt"] = rng.choice(PROMPTS)
            body |= rng.choice([{}, {"logprobs": rng.randint(0, 3)}, {"echo": True}])
        bodies.append(("chat/completions" if is_chat else "completions", body))
    return bodies


def offline(llm: LLM, path: str, body: dict[str, Any]) -> list[RequestOutput]:
    """What the offline engine makes of a body, for each of its prompts."""
    names = SamplingParams.__dataclass_fields__.keys()
    fields = {name: value for name, value in body.items() if name in names}
    fields["logit_bias"] = {int(i): bias for i, bias in body.get("logit_bias", {}).items()}
    if fields.get("top_k") == 0:
        fields["top_k"] = -1
    if path.startswith("chat"):
        if "logprobs" in body:
            fields["logprobs"] = body.get("top_logprobs", 0)
        params = SamplingParams(**fields)
        return llm.chat(body["messages"], params, use_tqdm=False)
    asked = body["prompt"]
    prompts = asked if isinstance(asked, list) and not isinstance(asked[0], int) else [asked]
    if body.get("echo") and "logprobs" in fields:
        fields["prompt_logprobs"] = fields["logprobs"]
    params = SamplingParams(**fields)
    return llm.generate(prompts, params, use_tqdm=False)


def assert_same(llm: LLM, body: dict[str, Any], got: dict[str, Any], wanted: Any) -> None:
    """The answer to a body has the ids, texts, ends, log probabilities and counts of the offline
    engine."""
    completions = [(part, output) for output in wanted for part in output.outputs]
    assert [choice["index"] for choice in got["choices"]] == list(range(len(completions)))
    for choice, (part, output) in zip(got["choices"], completions, strict=True):
        assert choice["token_ids"] == list(part.token_ids), body
        assert choice["finish_reason"] == part.finish_reason
        assert choice["stop_reason"] == part.stop_reason
        pairs = [*zip(part.token_ids, part.logprobs or (), strict=False)]
        if "message" in choice:
            assert choice["message"]["content"] == part.text
            _same_chat_logprobs(choice["logprobs"], pairs, body)
            assert got["prompt_token_ids"] == output.prompt_token_ids
            continue
        text = ""
        if body.get("echo"):
            ids = output.prompt_token_ids
            text = output.prompt or llm.get_tokenizer().decode(ids, skip_special_tokens=True)
            pairs = [*zip(ids, output.prompt_logprobs or (), strict=False), *pairs]
        assert choice["text"] == text + part.text
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        _same_logprobs(choice["logprobs"], pairs, body)
    num_prompt = sum(len(output.prompt_token_ids) for output in wanted)
    num_output = sum(len(part.token_ids) for part, _ in completions)
    usage = got["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
    assert usage["total_tokens"] == num_prompt + num_output


def _same_chat_logprobs(got: Any, pairs: Any, body: dict[str, Any]) -> None:
    if "logprobs" not in body:
        assert got is None
        return
    assert len(got["content"]) == len(pairs)
    for entry, (token, logprobs) in zip(got["content"], pairs, strict=True):
        assert entry["token"] == logprobs[token].decoded_token
        assert entry["logprob"] == pytest.approx(logprobs[token].logprob, abs=1e-4)
        best = sorted(logprobs.values(), key=lambda logprob: logprob.rank)
        best = best[: body["top_logprobs"]]
        assert [top["token"] for top in entry["top_logprobs"]] == [p.decoded_token for p in best]


def _same_logprobs(got: Any, pairs: Any, body: dict[str, Any]) -> None:
    if "logprobs" not in body:
        assert got is None
        return
    offset = 0
    assert {len(column) for column in got.values()} == {len(pairs)}
    for place, (token, logprobs) in enumerate(pairs):
        assert got["text_offset"][place] == offset
        offset += len(got["tokens"][place])
        if logprobs is None:
            assert (place, got["token_logprobs"][0], got["top_logprobs"][0]) == (0, None, None)
            continue
        assert got["tokens"][place] == logprobs[token].decoded_token
        assert got["token_logprobs"][place] == pytest.approx(logprobs[token].logprob, abs=1e-4)
        texts = {logprob.decoded_token for logprob in logprobs.values()}
        assert got["top_logprobs"][place].keys() == texts
