"""No answer has a character at which a reader of lines splits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.server.http.error_answers import HttpError, refusal
from tpengine.server.http.json_text import JsonAnswer, json_bytes
from tpengine.server.http.write import AnswerWriter, Style

ENDS = "\u2028a\u2029\x85\\\u2028\x0b\x0c\x1c\x1d\x1e\r\né🙂"


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def check(data: bytes) -> None:
    """It is one line of JSON, which has the text as it is."""
    (line,) = data.decode().splitlines()
    assert ENDS in "".join(texts_in(json.loads(line)))
    assert "é🙂".encode() in data, "other characters are not escaped"


@pytest.mark.parametrize("is_chat", [False, True])
async def test_answers(is_chat: bool) -> None:
    candidates = [{5: Logprob(-1.0, 1, ENDS)}]
    for logprobs in (None, 1):
        style = Style(is_chat, streams=True, logprobs=logprobs)
        writer = AnswerWriter(style, style.head("it", 1, "m"), None)
        for end in (None, "stop"):
            completion = CompletionOutput(0, ENDS, (5,), None, logprobs and candidates, end)
            completion.stop_reason = end and ENDS
            output = RequestOutput("it", ENDS, [1], None, [completion], end is not None)
            *first, last, empty = (await writer.write(output)).split(b"\n\n")
            assert len(b"".join(first).decode().splitlines()) == len(first)
            assert not empty
            check(last.removeprefix(b"data: "))
        fast = writer.write_tokens(RequestOutput("it", "", [1], None, [completion], False))
        if fast is not None:
            check(fast.removesuffix(b"\n\n").removeprefix(b"data: "))
        assert (fast is None) == (logprobs is not None)


def test_bodies() -> None:
    check(json_bytes([ENDS]))
    check(bytes(JsonAnswer({ENDS: ENDS}).body))
    check(bytes(refusal(HttpError(ENDS, 400, "x"), "it").body))
