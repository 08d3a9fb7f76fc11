"""Clients that no server wants: mutated requests.

Bodies of requests that are framed as HTTP asks go over connections that stay open; where the frame
itself is mutated, a connection serves one request.
"""

from __future__ import annotations

import json
import random
import socket
from copy import deepcopy
from http.client import HTTPResponse
from typing import Any

from support.mutations import mutated

from tpengine.proto import TIMEOUT_KEY
from tpengine.sampling_params import SamplingParams
from tpengine.server.http.fields import NO_EFFECT, REFUSED

ANSWER_S = 60.0
SILENT_S = 0.25
"""How long a server that has got no whole request is waited for."""
_JSON = "Content-Type: application/json"
_READ = json.loads
_GREEDY = {"max_tokens": 4, "temperature": 0}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_CHAT = _READ('{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "é"}]}')
_PARTS = _READ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "The sea"}]}]}')
_RICH = _READ("""{"n": 2, "temperature": 0.7, "max_tokens": 4, "seed": 5, "top_p": 0.9, "top_k": 9,
    "min_p": 0.1, "stop": ["é", "xyz"], "logit_bias": {"5": 1.5, "7": -2}, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "ignore_eos": true, "min_tokens": 1,
    "user": "me", "metadata": {"a": "b"}, "store": false, "return_token_ids": true,
    "stop_token_ids": [3], "priority": 0}""")
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The capital of France is", **_GREEDY}),
    ("/v1/completions", {"prompt": [[5, 900], [31]], "logprobs": 2, "echo": True, **_GREEDY}),
    ("/v1/completions", {"prompt": ["a", "b"], **_RICH, **_STREAM}),
    ("/v1/completions", {"prompt": [5, 6], "best_of": 2, "use_beam_search": True, **_GREEDY}),
    ("/v1/chat/completions", {**_CHAT, **_GREEDY, **_STREAM}),
    ("/v1/chat/completions", {**_PARTS, **_RICH, "logprobs": True, "top_logprobs": 2}),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": True}),
    ("/tokenize", {**_CHAT, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]
_PATHS = ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/x", "/", "*", "//"]
_METHODS = ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "POST", "BREW"]
_FOREIGN = [*SamplingParams.__dataclass_fields__, *" ".join([*NO_EFFECT, *REFUSED]).split()]
_FOREIGN += ["model", "tools", "response_format", "chat_template_kwargs", ""]
_VALUES: list[Any] = [
    *_READ("""[null, true, false, 0, -1, 1, 3, 2147483648, 9223372036854775808, -1e25, 0.5,
    -0.5, 1e300, NaN, Infinity, "", "a", "\\u0000", "\\ud800", "0", "5", [], [[]], [null], [0],
    [-1], ["a"], {}, {"a": 1}, {"5": "x"}, [{"role": "user"}], [1099511627776]]"""),
    *("é" * 300, "word " * 300, list(range(300)), _READ("[" * 200 + "]" * 200), 10**400),
]
_HEADERS = [
    *"""Content-Length: 0|Content-Length: -1|Content-Length: 5\r\nContent-Length: 6|Expect: 1|Host:
    |Content-Length: a|Content-Length: 99999999999999|Transfer-Encoding: gzip|Content-Encoding: gzip
    |Transfer-Encoding: chunked|Content-Type: text/plain|Content-Type: \xff|Expect: 100-continue
    |Connection: upgrade\r\nUpgrade: websocket|Connection: close|Authorization: Basic \xff\xfe
    |Authorization: Bearer|X-Request-Id: a b|X-Request-Id: {"\\|X-Request-Id:|X-Request-Id: one
    |Range: bytes=0-1|Origin: https://example.org""".replace("\n    ", "").split("|"),
    *("X-Request-Id: " + "a" * 200, "A" * 9000, "X-Many: 1\r\n" * 300 + "X: 1", " folded"),
    *(f"{TIMEOUT_KEY}: {value}" for value in ("0", "1", "-1", "9" * 40, "é")),
]


def mutated_body(body: dict[str, Any], rng: random.Random) -> bytes:
    """The body, most often with values, fields or bytes that are wrong."""
    body = deepcopy(body)
    for _ in range(rng.randint(0, 2)):
        field = rng.choice([*body, *rng.sample(_FOREIGN, 5)])
        value = deepcopy(rng.choice(_VALUES))
        entries = body.get(field)
        if isinstance(entries, list) and entries and rng.randrange(2):
            entry = rng.choice(entries)
            if isinstance(entry, dict):
                entry[rng.choice([*entry, "x"])] = value
            else:
                entries.append(value)
        elif rng.randrange(5):
            body[field] = value
        else:
            body.pop(field, None)
    data = json.dumps(body).encode()
    return mutated(data, rng) if rng.randrange(4) == 0 else data


def framed(path: str, body: bytes, method: str = "POST", *headers: str) -> bytes:
    """A request as HTTP asks, unless the headers say otherwise."""
    head = [f"{method} {path} HTTP/1.1", "Host: ", f"Content-Length: {len(body)}", _JSON, *headers]
    return "\r\n".join([*head, "\r\n"]).encode("latin-1") + body


def mutated_frame(path: str, body: bytes, rng: random.Random) -> bytes:
    """A request whose first line, headers or bytes are wrong."""
    paths = [path, *_PATHS]
    odd_path = mutated(rng.choice(paths).encode(), rng).decode("latin-1")
    frames = [
        framed(path, body, "POST", rng.choice(_HEADERS)),
        framed(rng.choice(paths), body, rng.choice(_METHODS)),
        framed(odd_path, body),
        mutated(framed(path, body), rng),
    ]
    return rng.choice(frames)


class Connection:
    """A connection that serves one request after another, and is opened again once it is closed."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def ask(self, data: bytes, silent_s: float = ANSWER_S) -> tuple[HTTPResponse, bytes] | None:
        """Sends bytes and returns the answer with its body; None: the server closed the connection,
        or said nothing for so long."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address)
        self._socket.settimeout(silent_s)
        answer = HTTPResponse(self._socket, method="HEAD" if data.startswith(b"HEAD") else None)
        try:
            self._socket.sendall(data)
            answer.begin()
        except (ConnectionError, TimeoutError):
            self.close()
            return None
        self._socket.settimeout(ANSWER_S)  # one that has begun must end
        body = answer.read()
        if answer.headers["connection"] == "close":
            self.close()
        return answer, body

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
