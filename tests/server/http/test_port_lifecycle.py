"""The HTTP port while the server loads, drains, is told to stop and dies: real processes."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess, wait_until

from server.http.openai_door import Door
from server.processes import END_S, dying_server, wait_for

SMALL = ["--cpu-kv-cache-space", "0.05", "--swap-space", "0", "--dtype", "float32"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def status(address: str, path: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=END_S)
    connection.request("GET", path)
    return connection.getresponse().status


def refused(answer: http.client.HTTPResponse) -> tuple[int, str]:
    """Status and code of a refusal."""
    code: str = json.loads(answer.read())["error"]["code"]
    assert (answer.getheader("retry-after") is not None) == (answer.status == 503)
    return answer.status, code


def last_event(stream: http.client.HTTPResponse) -> Any:
    """The last event of a stream, as JSON; None: it is [DONE]."""
    lines = [line for line in stream.read().splitlines() if line]
    data = lines[-1].removeprefix(b"data: ")
    return None if data == b"[DONE]" else json.loads(data)


def test_while_it_loads(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with dying_server(log, "start", *SMALL, "--http-port", "0") as (process, _):
        wait_for(log, "the ranks start")
        address = f"127.0.0.1:{wait_for(log, 'the HTTP port is ')}"
        assert (status(address, "/health"), status(address, "/ready")) == (200, 503)
        assert refused(Door(f"http://{address}").open("completions", LONG)) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_drains_and_a_second_one_stops(num_signals: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess(*SMALL, "--http-port", "0", log=log) as server:
        door = Door(server.http_address)
        address = server.http_address.removeprefix("http://")
        assert (status(address, "/health"), status(address, "/ready")) == (200, 200)
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert "uvloop" in maps
        stream = door.open("completions", {**LONG, "stream": True})
        stream.readline()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status(address, "/ready") == 503, END_S)
        assert status(address, "/health") == 200
        assert refused(door.open("completions", LONG)) == (503, "draining")
        if num_signals == 2:
            server.process.send_signal(signal.SIGTERM)
        end = last_event(stream)
        if num_signals == 1:
            assert end is None
            assert server.process.wait(END_S) == 0
        else:
            assert end is not None
            assert "told to stop at once" in end["error"]["message"]
            assert server.process.wait(END_S) == 128 + signal.SIGTERM


def test_the_engine_dies(tmp_path: Path) -> None:
    """A stream gets an event with the error, and a whole answer is one."""
    log = tmp_path / "log"
    with dying_server(log, "300", *SMALL, "--http-port", "0") as (process, _):
        address = f"127.0.0.1:{wait_for(log, 'the HTTP port is ')}"
        wait_until(lambda: status(address, "/ready") == 200, END_S)
        door = Door(f"http://{address}")
        whole = door.begin("completions", LONG)
        end = last_event(door.open("completions", {**LONG, "stream": True}))
        assert end["error"]["code"] == "engine_dead"
        assert refused(whole.getresponse()) == (503, "engine_dead")
        assert process.wait(END_S) == 1
    assert "SECRET" not in json.dumps(end)
