"""Clients of many kinds at the same time, directly and through nginx as Debian sets it up."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import third_party, tool_models
from support.programs import running
from support.server_process import ServerProcess, serving
from support.system_packages import require
from support.waiting import wait_until

from server.calls import as_client
from server.http.openai_door import TIMEOUT_S, Door
from server.http.test_tools import tool
from tpengine.proto import tpengine_pb2 as pb

pytestmark = [pytest.mark.check, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
KEY, MODEL, LATE_SEED, LATE_S = "sk-0123456789abcdef", "model", 70, 70
"""nginx waits 60 s for the next byte of a server."""
PATIENCE_S = 300
CALL: dict[str, Any] = {
    "model": MODEL,
    "temperature": 1,
    "seed": 3,
    "max_tokens": 300,
    "tools": [tool("Weather")],
    "messages": [{"role": "user", "content": "Do I need an umbrella?"}],
    "tool_choice": {"type": "function", "function": {"name": "Weather"}},
}
LATE: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "seed": LATE_SEED,
    "max_tokens": 20,
    "stream": True,
    "messages": [{"role": "user", "content": "Once upon a time"}],
}
LONG = {**LATE, "seed": 1, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("proxies")
    options = ["--model", str(tool_models.write(folder, "llama3")), "--dtype", "float32"]
    options += ["--http-port", "0", "--cpu-kv-cache-space", "0.05", "--api-key", KEY]
    program = ("-P", str(HERE.parent / "slow_server.py"), str(LATE_SEED), str(LATE_S))
    named = ["--served-model-name", MODEL]
    with serving(folder, *options, *named, program=program) as process:
        yield process


@pytest.fixture(scope="module")
def nginx(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, in front of the server."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(
        f"daemon off; user root; pid {folder}/pid; error_log {folder}/errors; events {{}} http {{ "
        f"access_log off; server {{ listen 127.0.0.1:{port}; "
        f"location / {{ proxy_pass {server.http_address}; }} }} }}"
    )
    words = [require("nginx", "nginx"), "-c", str(folder / "nginx.conf")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    wait_until((folder / "pid").exists, TIMEOUT_S)  # it listens before
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGQUIT)
    process.wait(TIMEOUT_S)


def commands(base_url: str) -> dict[str, list[str]]:
    """The clients: of Python, Node and Java, and curl, which offers HTTP/2 as Java does."""
    node, java = require("node", "nodejs"), require("java", "default-jdk")
    script = str(shutil.copy(HERE / "ai_client.mjs", third_party.ai_sdk()))
    langchain = third_party.programs("langchain", "langchain-openai>=0.3") / "python"
    words = [base_url, KEY, json.dumps(CALL), json.dumps(LATE)]
    head = [require("curl", "curl"), "-sS", "-N", "--http2", f"{base_url}/chat/completions"]
    head += ["-H", f"authorization: Bearer {KEY}", "-H", "content-type: application/json"]
    return {
        "openai": [sys.executable, str(HERE / "openai_client.py"), *words],
        "langchain-openai": [str(langchain), "-I", str(HERE / "langchain_client.py"), *words],
        "ai": [node, script, *words],
        "java": [java, str(HERE / "JavaClient.java"), *words],
        "curl": [*head, "-w", "\n", "-d", words[2], "--next", *head[1:], "-d", words[3]],
    }


def of_lines(said: str) -> tuple[str, Any, str]:
    """The call, its arguments and the late text in what Java and curl print."""
    first, *lines = [line for line in said.splitlines() if line]
    (call,) = json.loads(first)["choices"][0]["message"]["tool_calls"]
    assert sum(line.startswith(":") for line in lines) >= 4, "a comment each 15 s"
    *chunks, end = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert end == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return call["function"]["name"], json.loads(call["function"]["arguments"]), text


def test_clients_of_many_kinds_at_once(server: ServerProcess, nginx: str) -> None:
    """A chat with a tool, and a stream whose first token comes after 70 s."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started, results = {}, {}
    with ExitStack() as stack:
        for way, address in (("direct", server.http_address), ("nginx", nginx)):
            for name, words in commands(f"{address}/v1").items():
                started[name, way] = stack.enter_context(running(*words, **pipes))
        for (name, way), process in started.items():
            said, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, (name, way, said[-3000:])
            is_lines = name in ("java", "curl")
            results[name, way] = of_lines(said) if is_lines else json.loads(said.splitlines()[-1])
    for (name, way), (called, arguments, _) in results.items():
        assert (called, set(arguments)) == ("Weather", {"city", "days"})
        assert arguments == results[name, "direct"][1], way
    texts = {text for _, _, text in results.values()}
    assert len(texts) == 1
    assert texts != {""}


def test_nginx_passes_events_on_and_tells_a_cut(server: ServerProcess, nginx: str) -> None:
    """It holds no event back; a client learns that the server was killed in the middle."""
    with Door(nginx, KEY).open("chat/completions", LONG) as answer:
        assert answer.readline().startswith(b"data: ")
        assert server.stub.GetLoads(pb.GetLoadsRequest(), **as_client(KEY)).num_running == 1
        server.process.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
