"""Start, drain and end of a server, with real signals to real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.programs import python
from support.server_process import ServerProcess, wait_until

from server.calls import (
    NOT_SERVING,
    SERVING,
    TIMEOUT_S,
    UNKNOWN,
    Watcher,
    as_client,
    check,
    long_request,
    refused,
    running,
    token_files,
)
from server.guarded import Authority
from server.http.openai_door import Door
from server.processes import END_S, dying_server, session, wait_for
from tpengine.cli.main import main
from tpengine.config import EMBEDDED_MODEL
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc
from tpengine.server import lifecycle

Code = grpc.StatusCode
LONG = {"prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
SMALL = ["--cpu-kv-cache-space", "0.05", "--swap-space", "0", "--dtype", "float32"]
TOKEN, ADMIN = "a-token-of-a-client", "the-token-of-the-admin"


def http_refused(answer: HTTPResponse) -> tuple[int, str]:
    """Status and code of a refusal."""
    code: str = json.loads(answer.read())["error"]["code"]
    assert (answer.getheader("retry-after") is not None) == (answer.status == 503)
    return answer.status, code


def last_event(stream: HTTPResponse) -> Any:
    """The last event of a stream, as JSON; None: it is [DONE]."""
    lines = [line for line in stream.read().splitlines() if line]
    data = lines[-1].removeprefix(b"data: ")
    return None if data == b"[DONE]" else json.loads(data)


def test_health_by_name(server: ServerProcess) -> None:
    for name in ("", "readiness", "liveness", "tpengine.v1.GenerationService"):
        assert check(server.channel, name) == SERVING
        watcher = Watcher(server.channel, name)
        wait_until(lambda watcher=watcher: watcher.said == [SERVING], TIMEOUT_S)
        watcher.close()
    stub = health_pb2_grpc.HealthStub(server.channel)
    unknown = health_pb2.HealthCheckRequest(service="unknown")
    assert refused(stub.Check, unknown).code is Code.NOT_FOUND
    watcher = Watcher(server.channel, "unknown")
    wait_until(lambda: watcher.said == [UNKNOWN], TIMEOUT_S)
    watcher.close()


class Guarded:
    """A server with TLS, tokens and two doors."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority = Authority.make(folder)
        self.files = files = authority.sign("server", folder)
        options = ["--host", "127.0.0.1", "--tls-cert", files.certificate, "--tls-key", files.key]
        options += ["--http-port", "0", "--drain-timeout", "300"]
        options += token_files(folder, TOKEN, admin=ADMIN)
        self.process = ServerProcess(*SMALL, *options, log=folder / "log")
        context = ssl.create_default_context(cafile=authority.certificate)
        self.door = Door(self.process.http_address, TOKEN, context)
        trusted = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
        self.channel = grpc.secure_channel(self.process.target, trusted)
        self.stub = tpengine_pb2_grpc.GenerationServiceStub(self.channel)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = Guarded(tmp_path_factory.mktemp("guarded"))
    yield server
    server.channel.close()
    server.process.stop()


def test_start_up_reports_its_phases(guarded: Guarded) -> None:
    log = guarded.process.log.read_text()
    for phase in ("listen", "engine", "first token"):
        assert re.search(rf"start-up: {phase} took \d+\.\d\d s", log)
    ready = next(line for line in log.splitlines() if line.startswith("tpengine is ready on "))
    for word in (guarded.process.target, "'embedded'", "TLS and tokens", "import", "engine"):
        assert word in ready


def test_a_reload_is_told_once(guarded: Guarded) -> None:
    files = guarded.authority.sign("next", guarded.authority.folder / "next")
    files.install(guarded.files)
    expected = Path(files.certificate).read_text().strip()
    for address in (guarded.process.target, guarded.door.host):
        host, _, port = address.partition(":")
        place = (host, int(port))
        wait_until(lambda place=place: ssl.get_server_certificate(place).strip() in expected, END_S)
    assert guarded.process.log.read_text().count("new connections get") == 1
    assert guarded.process.log.read_text().count("is valid from") == 2, "told at each load"


def test_who_may_abort_whose_request(guarded: Guarded) -> None:
    stub = guarded.stub
    assert refused(stub.Generate, long_request(1)).code is Code.UNAUTHENTICATED
    stream = stub.GenerateStream(long_request(2000, request_id="its"), **as_client(ADMIN))
    next(stream)
    abort = pb.AbortRequest(request_id="its")
    assert refused(stub.Abort, abort, **as_client(TOKEN)).code is Code.PERMISSION_DENIED
    assert stub.Abort(abort, **as_client(ADMIN)).aborted
    assert refused(lambda **_: stream).code is Code.CANCELLED
    stream = stub.GenerateStream(long_request(2000, request_id="its"), **as_client(TOKEN))
    next(stream)
    assert stub.Abort(abort, **as_client(TOKEN)).aborted
    stream.cancel()


def test_no_client_learns_what_others_have_sent(guarded: Guarded) -> None:
    request = long_request(1, prompt_token_ids=pb.TokenIds(ids=range(100, 164)))
    answers = [guarded.stub.Generate(request, **as_client(key)) for key in (TOKEN, ADMIN, TOKEN)]
    first, other, again = (answer.usage.num_cached_tokens for answer in answers)
    assert first == other == 0 < again


def test_a_drain_and_the_signal_after_it(guarded: Guarded) -> None:
    """Health changes first, new requests are refused, running ones finish, the exit code is 0.
    Orchestrators drain and then send a signal, which is then no second one."""
    process, stub = guarded.process.process, guarded.stub
    ready = Watcher(guarded.channel, "readiness")
    alive = Watcher(guarded.channel, "liveness")
    wait_until(lambda: ready.said == [SERVING] and alive.said == [SERVING], TIMEOUT_S)
    long = long_request(800)
    stream = stub.GenerateStream(long, **as_client(TOKEN))
    num_tokens = len(next(stream).outputs[0].token_ids)
    unary = stub.Generate.future(long, **as_client(TOKEN))
    http_stream = guarded.door.open("completions", {**LONG, "max_tokens": 800, "stream": True})
    assert "uvloop" in Path(f"/proc/{process.pid}/maps").read_text()
    assert (guarded.door.open("/health").status, guarded.door.open("/ready").status) == (200, 200)
    wait_until(
        lambda: stub.GetLoads(pb.GetLoadsRequest(), **as_client(TOKEN)).num_running == 3, TIMEOUT_S
    )
    assert stub.Drain(pb.DrainRequest(), **as_client(ADMIN)).num_open_calls == 3
    wait_until(lambda: ready.said == [SERVING, NOT_SERVING], TIMEOUT_S)
    process.send_signal(signal.SIGTERM)
    wait_for(guarded.process.log, "SIGTERM: the server ends already")
    assert refused(stub.Generate, long_request(1), **as_client(TOKEN)).code is Code.UNAVAILABLE
    assert (guarded.door.open("/health").status, guarded.door.open("/ready").status) == (200, 503)
    assert http_refused(guarded.door.open("completions", LONG)) == (503, "draining")
    assert process.poll() is None
    messages = list(stream)
    assert messages[-1].finished
    assert num_tokens + sum(len(message.outputs[0].token_ids) for message in messages) == 800
    assert unary.result(END_S).usage.num_output_tokens == 800
    assert last_event(http_stream) is None
    assert process.wait(END_S) == 0
    assert alive.said == [SERVING]
    for watcher in (ready, alive):
        watcher.close()
    wait_until(lambda: not session(process.pid), TIMEOUT_S)  # init buries what it has adopted


@pytest.mark.parametrize("both_at_once", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_second_signal_ends_at_once(both_at_once: bool, tmp_path: Path) -> None:
    """The clients of unary and streamed calls get the reason."""
    assert lifecycle._AT_ONCE_S <= 1.0, "within a second, as the pages say; this server has longer"
    log = tmp_path / "log"
    with dying_server(log, "1000000", *SMALL, "--http-port", "0") as (process, stub, _):
        wait_for(log, "tpengine is ready")
        door = Door(f"http://127.0.0.1:{wait_for(log, 'the HTTP port is ')}")
        http_stream = door.open("completions", {**LONG, "stream": True})
        http_stream.readline()
        call = stub.Generate.future(long_request(2000))
        with running(stub, long_request(2000)) as stream:
            wait_until(lambda: stub.GetLoads(pb.GetLoadsRequest()).num_running == 3, TIMEOUT_S)
            if both_at_once:
                process.send_signal(signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            if not both_at_once:
                wait_for(log, "no new requests")
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            assert process.wait(END_S) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            for outcome in (refused(call.result), refused(lambda **_: stream)):
                assert outcome.code is Code.UNAVAILABLE
                assert outcome.text == "the server was told to stop at once; ask another"
        assert "told to stop at once" in last_event(http_stream)["error"]["message"]
        assert log.read_text().count("ending at once") == 1


def test_a_server_whose_log_nothing_reads(tmp_path: Path) -> None:
    """Not a line of it can be written. The server serves, and a closed terminal drains it."""
    log = tmp_path / "log"
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    os.write(sink, bytes(1 << 20))
    os.set_blocking(sink, True)
    options = [*SMALL, "--http-port", "0", "--isolate"]
    with dying_server(log, "1000000", *options, stderr=sink) as (process, stub, _):
        os.close(sink)
        wait_for(log, "tpengine is ready")
        door = Door(f"http://127.0.0.1:{wait_for(log, 'the HTTP port is ')}")
        for _ in range(3):
            assert stub.Generate(long_request(1), timeout=TIMEOUT_S).finished
        with running(stub, long_request(300)) as stream:
            http_stream = door.open("completions", {**LONG, "max_tokens": 300, "stream": True})
            assert door.open("/health").status == 200
            process.send_signal(signal.SIGHUP)
            assert list(stream)[-1].finished
            assert last_event(http_stream) is None
        assert process.wait(END_S) == 0
    os.close(source)


def test_a_dead_engine_ends_the_server(tmp_path: Path) -> None:
    """Every call that is open is told: over HTTP a stream by an event."""
    log = tmp_path / "log"
    with dying_server(log, "300", *SMALL, "--http-port", "0") as (process, stub, _):
        wait_for(log, "tpengine is ready")
        door = Door(f"http://127.0.0.1:{wait_for(log, 'the HTTP port is ')}")
        call = stub.Generate.future(long_request(500))
        whole = door.begin("completions", LONG)
        end = last_event(door.open("completions", {**LONG, "stream": True}))
        assert end["error"]["code"] == "engine_dead"
        assert http_refused(whole.getresponse()) == (503, "engine_dead")
        outcome = refused(call.result)
        assert outcome.code is Code.UNAVAILABLE
        assert "SECRET" not in f"{outcome.text}{end}"
        assert process.wait(END_S) == 1
        assert "the engine is dead" in log.read_text()


@pytest.mark.parametrize(
    ("num_signals", "drain_s", "code", "words"),
    [
        (1, "0.5", 1, "hangs in a step"),
        pytest.param(2, "600", 128 + signal.SIGTERM, "ending at once", marks=pytest.mark.soak),
    ],
)
def test_a_step_that_hangs_does_not_hold_up_the_end(
    num_signals: int, drain_s: str, code: int, words: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with dying_server(log, "hang", *SMALL, "--drain-timeout", drain_s) as (process, stub, _):
        wait_for(log, "tpengine is ready")
        call = stub.Generate.future(long_request(500))
        assert int(wait_for(log, "the step hangs; objects frozen: ")) > 10_000
        for _ in range(num_signals):
            process.send_signal(signal.SIGTERM)
            wait_for(log, "no new requests")
        assert process.wait(END_S) == code
        outcome = refused(call.result)
        assert outcome.code is Code.UNAVAILABLE
        assert ("told to stop at once" in outcome.text) == (num_signals == 2)
        assert words in log.read_text()


def test_start_up_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with dying_server(log, "start", *SMALL, "--startup-timeout", "1") as (process, *_):
        assert process.wait(END_S) == 1
    said = log.read_text()
    assert "startup_timeout = 1 s" in said
    assert "'engine'" in said


def test_a_server_that_loads_shows_its_health_and_ends_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with dying_server(log, "start", *SMALL, "--http-port", "0") as (process, stub, channel):
        wait_for(log, "the ranks start")
        assert [check(channel, of) for of in ("liveness", "readiness")] == [SERVING, NOT_SERVING]
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
        assert info.state == pb.SERVER_STATE_LOADING
        door = Door(f"http://127.0.0.1:{wait_for(log, 'the HTTP port is ')}")
        assert (door.open("/health").status, door.open("/ready").status) == (200, 503)
        assert http_refused(door.open("completions", LONG)) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
    assert "SIGTERM during start-up" in log.read_text()
    assert "the ranks have ended" in log.read_text()


def test_wrong_sampling_of_a_model_ends_the_start(tmp_path: Path) -> None:
    """Before the weights are looked for, which the folder does not have."""
    shutil.copy(Path(EMBEDDED_MODEL, "config.json"), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    ended = python("-m", "tpengine", "serve", "--port", "0", "--model", tmp_path, code=1)
    assert re.search(r"generation_config\.json of .*temperature.*'hot'", ended.stderr)


def test_what_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    """Refused before anything slow is done, with one line: no traceback, no line of gRPC. The
    caller's handlers of signals are as before."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, words in (
            (["--port", port], ("already in use", port, "--port")),
            (["--host", "192.0.2.1", "--insecure"], ("not one of this machine", "--host")),
            (["--host", "nowhere.invalid", "--insecure"], ("nowhere.invalid", "neither an")),
            (["--host", "0.0.0.0"], ("--insecure", "--tls-cert")),
            (["--token-file", "/nowhere"], ("/nowhere",)),
            (["--tls-cert", "/nowhere", "--tls-key", "/nowhere"], ("/nowhere",)),
            (["--max-queued-requests", "0"], ("max_requests", "at least 1")),
            (["--max-queued-tokens", "0"], ("max_tokens", "at least 1")),
            (["--port", "0", "--metrics-port", port], ("already in use", "--metrics-port", port)),
        ):
            assert main(["serve", *options]) == 1
            said = capfd.readouterr().err
            assert said.startswith("tpengine: ConfigError: ")
            assert said.count("\n") == 1
            for word in words:
                assert word in said
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
