"""OpenAI clients of other projects, unchanged, each in its own environment and process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import third_party, tool_models
from support.server_process import ServerProcess
from support.system_packages import require

from tpengine import LLM, SamplingParams
from tpengine.config import EMBEDDED_MODEL

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
KEY, MODEL = "sk-0123456789abcdef", "embedded"
PROMPT, NUM_TOKENS = "Once upon a time", 12
PATIENCE_S = 120
NUM_LOAD, STREAMS, LOAD_TOKENS = 24, 8, 10


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """Texts of the offline engine, for the prompt as it is and as a message; tokens of that one."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(dtype="float32", num_device_blocks_override=256) as llm:
        (text,) = llm.generate(PROMPT, params, use_tqdm=False)
        messages = [{"role": "user", "content": PROMPT}]
        (chat,) = llm.chat(messages, params, use_tqdm=False)
    texts = {"text": text.outputs[0].text, "chat": chat.outputs[0].text}
    return {**texts, "num_chat_tokens": len(chat.outputs[0].token_ids)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key and a short queue."""
    log = tmp_path_factory.mktemp("clients") / "log"
    options = ["--dtype", "float32", "--num-device-blocks-override", "512", "--http-port", "0"]
    options += ["--max-model-len", "512", "--max-num-seqs", "8", "--max-queued-requests", "8"]
    options += ["--served-model-name", MODEL, "--api-key", KEY]
    with ServerProcess(*options, log=log) as process:
        yield process
    assert "Traceback" not in log.read_text()


def _run(*command: str | Path, **environment: str) -> str:
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**clean, **environment},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _script(
    name: str, packages: str, server: ServerProcess, kind: str = "", **environment: str
) -> dict[str, Any]:
    python = third_party.programs(name, packages) / "python"
    words = (server.http_address, KEY, MODEL, PROMPT, str(NUM_TOKENS))
    shown = _run(python, "-I", HERE / f"{name}{kind}_client.py", *words, **environment)
    found: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def openai_calls(server: ServerProcess) -> dict[str, Any]:
    """What the package gave."""
    return _script("openai", "openai>=2", server)


def test_openai(openai_calls: dict[str, Any], answers: dict[str, Any]) -> None:
    found = openai_calls
    assert found["models"] == [found["model"]] == [MODEL]
    assert set(found["completions"]) == {answers["text"]}
    assert set(found["chats"]) == {answers["chat"]}
    assert bytes(found["token_bytes"]).decode().startswith(answers["chat"])
    assert set(found["num_candidates"]) == {2}
    assert [usage["completion_tokens"] for usage in found["usage"]] == [NUM_TOKENS] * 2
    assert found["usage"][0] == found["usage"][1]
    assert found["request_id"]
    assert found["finish_reasons"] == ["length"] * 2
    assert {"chunk", "content.delta", "content.done"} <= set(found["events"])
    # The package waits as long as Retry-After says, and asks again.
    assert found["ends"] == [["Completion", "RateLimitError"], ["Completion"]]


def test_exceptions_of_openai(openai_calls: dict[str, Any]) -> None:
    found = openai_calls["errors"]
    assert all(end.pop() for end in found.values()), "each answer has an id"
    assert {name: end[:2] for name, end in found.items()} == {
        "key": ["AuthenticationError", 401],
        "model": ["NotFoundError", 404],
        "temperature": ["BadRequestError", 400],
        "stream": ["BadRequestError", 400],
        "suffix": ["BadRequestError", 400],
        "length": ["BadRequestError", 400],
        "messages": ["BadRequestError", 400],
        "embeddings": ["NotFoundError", 404],
    }
    assert found["length"][2] == "context_length_exceeded"
    assert found["model"][2] == "model_not_found"
    assert {name: end[3] for name, end in found.items() if end[3]}.items() >= {
        ("temperature", "temperature"),
        ("stream", "temperature"),
        ("suffix", "suffix"),
    }


def test_litellm(server: ServerProcess, answers: dict[str, Any]) -> None:
    found = _script("litellm", "litellm>=1.60", server, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert (set(found["chats"]), set(found["texts"])) == ({answers["chat"]}, {answers["text"]})
    assert found["errors"] == {
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
    with ServerProcess(*options, log=folder / "log") as process:
        yield process
    assert "Traceback" not in (folder / "log").read_text()


def test_tools_of_openai(tool_server: ServerProcess) -> None:
    found = _script("openai", "openai>=2", tool_server, "_tools")
    ((name, arguments),) = found["whole"]
    assert name == "Weather"
    assert found["streamed"] == found["whole"]
    assert found["pieces"] == [name, arguments]
    assert found["reasons"] == ["tool_calls"] * 2
    assert "tool_calls.function.arguments.done" in found["events"]
    assert found["parsed"] == [json.loads(arguments)] * 2
    assert found["after"] == "tool_calls"
    assert set(found["form"]) == {"city", "days"}


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
    tokens = run["metrics"]["output_token_count"]["successful"]
    assert tokens["total_sum"] == NUM_LOAD * LOAD_TOKENS


def test_curl(server: ServerProcess, answers: dict[str, Any]) -> None:
    curl = [require("curl", "curl"), "-sS", "-w", "\n%{http_code} %{content_type}"]
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS}
    url = f"{server.http_address}/v1/completions"
    key = ["-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"]
    *_, end = _run(*curl, url, "-d", json.dumps(body)).splitlines()
    assert end.split() == ["401", "application/json"]
    said, end = _run(*curl, *key, url, "-d", json.dumps(body)).splitlines()
    assert json.loads(said)["choices"][0]["text"] == answers["text"]
    stream = _run(*curl, "-N", *key, url, "-d", json.dumps({**body, "stream": True}))
    *events, end = stream.split("\n\n")
    assert end.split()[:2] == ["200", "text/event-stream;"]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(chunks) > 1  # outputs that arrive while one is written share the next chunk
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answers["text"]
