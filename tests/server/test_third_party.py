"""Clients of other projects, each in its own environment and process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from support import third_party
from support.engines import greedy
from support.server_process import ServerProcess

from tpengine import LLM

pytestmark = pytest.mark.check
SERVICE = "tpengine.v1.GenerationService"
PROMPT, NUM_TOKENS = "Once upon a time", 12
PATIENCE_S = 60


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def _curl(target: str, *words: str) -> str:
    curl = [third_party.buf(), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    return _run(*curl, *words[:-1], f"http://{target}{words[-1]}")


def _json_stream(text: str) -> list[dict[str, Any]]:
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, end = decoder.raw_decode(text, at)
        values.append(value)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return values


def test_buf_lists_what_there_is(server: ServerProcess) -> None:
    services = _curl(server.target, "--list-services", "").split()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
    assert f"{SERVICE}/GenerateStream" in _curl(server.target, "--list-methods", "").split()


def test_buf_asks_for_health(server: ServerProcess) -> None:
    words = ["-d", '{"service": "readiness"}', "/grpc.health.v1.Health/Check"]
    assert json.loads(_curl(server.target, *words)) == {"status": "SERVING"}


def test_buf_reads_a_stream(server: ServerProcess, llm: LLM) -> None:
    (offline,) = llm.generate(PROMPT, greedy(NUM_TOKENS), use_tqdm=False)
    request = {
        "prompt": PROMPT,
        "sampling": {"temperature": 0, "maxTokens": NUM_TOKENS, "ignoreEos": True},
    }
    words = ["-d", json.dumps(request), f"/{SERVICE}/GenerateStream"]
    messages = _json_stream(_curl(server.target, *words))
    outputs = [output for message in messages for output in message.get("outputs", [])]
    assert [token for output in outputs for token in output.get("tokenIds", [])] == [
        *offline.outputs[0].token_ids
    ]
    assert messages[-1]["finished"]
    assert outputs[-1]["finishReason"] == "FINISH_REASON_LENGTH"
