"""Clients of other projects, each in its own environment and process."""

from __future__ import annotations

import json

import pytest
from support import third_party
from support.engines import greedy
from support.programs import run_program
from support.server_process import ServerProcess

from tpengine import LLM

pytestmark = pytest.mark.check
SERVICE = "tpengine.v1.GenerationService"
PROMPT, NUM_TOKENS = "Once upon a time", 12


def _curl(target: str, *words: str) -> str:
    curl = [third_party.buf(), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
    return run_program(*curl, *words[:-1], f"http://{target}{words[-1]}").stdout


def test_buf_lists_what_there_is(server: ServerProcess) -> None:
    services = _curl(server.target, "--list-services", "").split()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
    assert f"{SERVICE}/GenerateStream" in _curl(server.target, "--list-methods", "").split()


def test_buf_asks_for_health(server: ServerProcess) -> None:
    words = ["-d", '{"service": "readiness"}', "/grpc.health.v1.Health/Check"]
    assert json.loads(_curl(server.target, *words)) == {"status": "SERVING"}


def test_buf_reads_a_stream(server: ServerProcess, llm: LLM) -> None:
    (offline,) = llm.generate(PROMPT, greedy(NUM_TOKENS), use_tqdm=False)
    sampling = {"temperature": 0, "maxTokens": NUM_TOKENS, "ignoreEos": True}
    request = json.dumps({"prompt": PROMPT, "sampling": sampling})
    words = ["-d", request, f"/{SERVICE}/GenerateStream"]
    shown = _curl(server.target, *words).replace("}\n{", "},\n{")  # one object after another
    messages = json.loads(f"[{shown}]")
    outputs = [output for message in messages for output in message.get("outputs", [])]
    token_ids = tuple(token for output in outputs for token in output.get("tokenIds", []))
    assert token_ids == offline.outputs[0].token_ids
    assert messages[-1]["finished"]
    assert outputs[-1]["finishReason"] == "FINISH_REASON_LENGTH"
