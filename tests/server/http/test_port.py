"""The HTTP port by itself: rules of HTTP, bounds, keys and certificates; nothing is left over."""

from __future__ import annotations

import asyncio
import collections
import http.client
import itertools
import json
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from support.waiting import wait_until

from server.guarded import WAIT_S, Authority, TlsFiles
from server.http.open_port import LOCAL, OpenPort, open_port, posted, read_answer, request
from tpengine.errors import ConfigError, QueueFullError
from tpengine.server import auth
from tpengine.server.auth import Authenticator, is_own_host
from tpengine.server.http import calls, http_server, openai_routes, protocol
from tpengine.server.http.openai_routes import _EventStream
from tpengine.server.lifecycle import open_metrics_port
from tpengine.server.limits import Limits
from tpengine.server.server_args import ServerArgs
from tpengine.server.state import ServerState

ONE, ADMIN = "one-0123456789abcdef", "admin-0123456789abcdef"
JSON = "content-type: application/json"
NO_JSON, TOO_LARGE = "unsupported_media_type", "request_too_large"
SMALL = 1000
HEALTH = request("/health")
CHUNKED = request("/tokenize", JSON, "transfer-encoding: chunked", method="POST")


def announced(size: int, *headers: str) -> bytes:
    """The head of a request whose body follows."""
    return request("/tokenize", JSON, f"content-length: {size}", *headers, method="POST")


@pytest.fixture(scope="module")
def port() -> Iterator[OpenPort]:
    with open_port(limits=Limits(max_message_bytes=SMALL)) as port:
        yield port


@pytest.fixture(scope="module")
def keeping() -> Iterator[OpenPort]:
    with open_port(limits=Limits(resume_window_s=60.0)) as port:
        yield port


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01 garbage\r\n\r\n", 400, None),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, None),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400, None),
        (posted(b"{}", "transfer-encoding: chunked"), 400, None),
        (CHUNKED + b"zz\r\n", 400, None),
        (request("/" + "a" * 20_000), 431, "head_too_large"),
        (request("/health", "x: " + "a" * 20_000), 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000, 431, "head_too_large"),
        (posted(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"), 400, None),
        (request("/none"), 404, "unknown_url"),
        (request("/health/"), 404, "unknown_url"),
        (request("/%ff%00%0a"), 404, "unknown_url"),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n", 404, "unknown_url"),
        (request("/v1/models", method="POST"), 405, "method_not_allowed"),
        (request("/v1/completions", method="OPTIONS"), 405, "method_not_allowed"),
        (request("/tokenize", method="POST", body=b"{}"), 415, NO_JSON),
        (request("/tokenize", "content-type: text/plain", method="POST"), 415, NO_JSON),
        (posted(b"{}", "content-encoding: gzip"), 415, NO_JSON),
        (posted(b"{}", "x-timeout-ms: soon"), 400, None),
        (posted(b"x" * (SMALL + 1)), 413, TOO_LARGE),
        (posted(b"x" * 300_000), 413, TOO_LARGE),
        (announced(10**19), 413, TOO_LARGE),
        (request("/tokenize", JSON, f"content-length: {'0' * 5000}", method="POST"), 400, None),
        (CHUNKED + b"1f4\r\n" + b" " * 500 + b"\r\n1f5\r\n" + b" " * 501 + b"\r\n", 413, TOO_LARGE),
        (posted(b"["), 400, None),
        (posted(b"[]"), 400, None),
        (posted(b"[" * 900), 400, None),
        (posted(b'{"a": NaN}'), 400, None),
        (posted(b'{"a": -1e999}'), 400, None),
        (posted(b'{"a": "\\ud800"}'), 400, None),
        (posted(b'{"a": "\xff"}'), 400, None),
        (posted(b"{}"), 503, "loading"),
        (request("/v1/models"), 503, "loading"),
    ],
)  # fmt: skip
def test_what_is_refused(port: OpenPort, sent: bytes, status: int, code: str | None) -> None:
    answer = port.send(sent)
    assert (answer.status, answer.error["code"]) == (status, code), answer.body
    assert ("retry-after" in answer.headers) == (status == 503)
    if status == 405:
        assert answer.headers["allow"]
    wait_until(lambda: port.held() == (0, 0, 0), WAIT_S)


@pytest.mark.parametrize(("depth", "status"), [(200, 503), (300, 400), (1000, 400)])
@pytest.mark.parametrize(
    ("begin", "end", "size"), [("[", "]", 1), ('{"a":', "}", 1), ('[{"a":', "}]", 2)]
)
def test_a_body_is_not_nested_too_deeply(
    keeping: OpenPort, begin: str, end: str, size: int, depth: int, status: int
) -> None:
    """The window of a stream has its body compared with that of the next call."""
    count = depth // size
    body = f'{{"stream": true, "stop": {begin * count}1{end * count}}}'.encode()
    headers = (JSON, "idempotency-key: k", "x-resume-window: 9")
    answer = keeping.send(request("/v1/completions", *headers, method="POST", body=body))
    assert answer.status == status
    assert ("nested" in answer.error["message"]) == (status == 400)


def test_health_while_the_model_loads(port: OpenPort) -> None:
    """One connection serves many requests; a HEAD has no body; ids come back."""
    statuses = {"/health": 200, "/ready": 503, "/version": 200, "/metrics": 200}
    with port.connect() as client, client.makefile("rb") as stream:
        for (path, status), method in itertools.product(statuses.items(), ("GET", "HEAD")):
            client.sendall(request(path, f"x-request-id: of-{path}", method=method))
            answer = read_answer(stream, has_body=method == "GET")
            assert (answer.status, answer.headers["x-request-id"]) == (status, f"of-{path}")
            assert answer.headers["date"].endswith("GMT")
    for own_id in ("a b", "x" * 200, "x" * 9000, "k=1; \t'[]{}\"", "\u00e9"):  # of gateways
        sent = request("/health", f"x-request-id: {own_id}")
        answer = port.send(sent.decode().encode("latin-1"))
        assert (answer.status, answer.headers["x-request-id"]) == (200, own_id)


@pytest.mark.parametrize("offer", ["h2c", "websocket", "TLS/1.0", "HTTP/3.0, x"])
def test_an_offer_of_another_protocol_changes_nothing(port: OpenPort, offer: str) -> None:
    """In one piece or in several; the same connection serves what follows."""
    headers = "connection: Upgrade, HTTP2-Settings", f"upgrade: {offer}", "http2-settings: AAMAAABk"
    whole, more = posted(b"{}", *headers), "transfer-encoding: chunked"
    chunked = request("/tokenize", JSON, *headers, more, method="POST") + b"2\r\n[]\r\n0\r\n\r\n"
    with port.connect() as client, client.makefile("rb") as stream:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in (20, whole.index(b"{}"), whole.index(b"{}") + 1, len(whole)):
            client.sendall(whole[:cut])
            client.sendall(whole[cut:])
            assert read_answer(stream).error["code"] == "loading", "it has read the body"
        client.sendall(chunked + whole + request("/health", *headers) + HEALTH)
        assert [read_answer(stream).status for _ in range(4)] == [400, 503, 200, 200]
        client.sendall(request("/x" * 9000, *headers))
        assert read_answer(stream).status == 431


def test_a_client_that_asks_first_need_not_send_its_body(port: OpenPort) -> None:
    with port.connect() as client, client.makefile("rb") as stream:
        client.sendall(announced(5000, "expect: 100-continue"))
        assert (read_answer(stream).status, stream.read()) == (413, b"")
    with port.connect() as client, client.makefile("rb") as stream:
        client.sendall(announced(2, "expect: 100-continue"))
        assert stream.readline() + stream.readline() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"{}")
        assert read_answer(stream).status == 503


def test_a_body_that_is_not_wanted_keeps_the_connection(port: OpenPort) -> None:
    with port.connect() as client:
        stream = client.makefile("rb")
        client.sendall(posted(b"x" * 200_000) + HEALTH)
        assert [read_answer(stream).status for _ in range(2)] == [413, 200]


def test_pipelined_requests_are_bounded(port: OpenPort) -> None:
    with port.connect() as client:
        client.sendall(HEALTH * 10)
        stream = client.makefile("rb")
        assert [read_answer(stream).status for _ in range(10)] == [200] * 10
        client.sendall(HEALTH * 500)
        statuses = [read_answer(stream).status for _ in range(protocol.MAX_PIPELINED + 2)]
        assert statuses == [200] * (protocol.MAX_PIPELINED + 1) + [429]
        assert stream.read() == b""


@pytest.mark.parametrize(
    ("bound", "begun", "status"),
    [
        ("head_s", b"", None),
        ("head_s", b"\r\n\r\n", 408),
        ("head_s", b"GET / HTTP/1.1\r\nho", 408),
        ("idle_s", HEALTH, 200),
        ("DISCARD_S", announced(5000) + b"x", 413),
        ("message_s", announced(50) + b"{", 408),
    ],
)
def test_slow_clients(
    bound: str, begun: bytes, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told what they may be told, and lose their connection."""
    soon = {bound, "DISCARD_S"} if bound == "message_s" else {bound}
    names = ("head_s", "idle_s", "message_s")
    bounds: Any = {name: 0.1 if name in soon else 60.0 for name in names}
    monkeypatch.setattr(protocol, "DISCARD_S", 0.1 if "DISCARD_S" in soon else 60.0)
    with open_port(limits=Limits(max_message_bytes=SMALL, **bounds)) as port, port.connect() as tcp:
        tcp.sendall(begun)
        stream = tcp.makefile("rb")
        if status is not None:
            assert read_answer(stream).status == status
        assert stream.read() == b""
        stream.close()
        tcp.close()
        wait_until(lambda: port.held() == (0, 0, 0), WAIT_S)


def test_connections_and_calls_are_bounded() -> None:
    with open_port(limits=Limits(max_connections=5, max_host_connections=3)) as port:
        held = [port.connect() for _ in range(3)]
        wait_until(lambda: port.held()[0] == 3, WAIT_S)
        answer = port.send(b"")
        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        held.pop().close()
        wait_until(lambda: port.held()[0] == 2, WAIT_S)
        assert port.send(request("/v1/models")).status == 503
        for client in held:
            client.close()


def test_large_bodies_leave_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[tuple[bool, float, float]] = []

    def parse(body: bytes) -> dict[str, Any]:
        begin = time.monotonic()
        time.sleep(0.02)
        parsed.append((len(body) > SMALL, begin, time.monotonic()))
        return {}

    monkeypatch.setattr(calls, "orjson", SimpleNamespace(loads=parse, JSONDecodeError=ValueError))
    large, small = posted(b"{%66000s}" % b""), posted(b"{}")
    with open_port() as port, ExitStack() as stack:
        ends = [stack.enter_context(port.connect()) for _ in range(5)]
        for end in ends:
            end.sendall(large)
        while len(parsed) < 5:
            assert port.send(small).status == 503
        answers = [read_answer(stack.enter_context(end.makefile("rb"))) for end in ends]
    assert {answer.status for answer in answers} == {503}
    spans = [(begin, end) for is_large, begin, end in parsed if is_large]
    for (begin, end), (next_begin, _) in itertools.pairwise(spans):
        assert next_begin - end >= 3 * (end - begin)
    assert len(spans) == 5
    assert any(not is_large and begin < spans[-1][0] for is_large, begin, _ in parsed)


def test_keys_and_cors() -> None:
    known = Authenticator([ONE], [ADMIN])
    with open_port(authenticator=known, cors=("https://a.example",)) as port:
        for path in ("/v1/models", "/metrics", "/none", "/v1/completions"):
            for header in ("x: y", "authorization: Bearer wrong", f"authorization: Basic {ONE}"):
                answer = port.send(request(path, header, "origin: https://a.example"))
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["access-control-allow-origin"] == "https://a.example"
        for token in (ONE, ADMIN):
            answer = port.send(request("/v1/models", f"authorization: Bearer {token}"))
            assert answer.status == 503
        assert port.send(request("/version")).status == 200
        for origin, allowed in (("a.example", True), ("b.example", False)):
            asks = ("access-control-request-method: POST", f"origin: https://{origin}")
            asks += ("access-control-request-private-network: true",)
            with port.connect() as client:  # its answer has no request id, as no route is asked
                client.sendall(request("/v1/x", "connection: close", *asks, method="OPTIONS"))
                head = client.makefile("rb").read().decode()
            assert ("access-control-allow-origin" in head) == allowed
            assert head.startswith("HTTP/1.1 200") == allowed
            assert "access-control-allow-private-network: true" in head
    with open_port() as port:
        answer = port.send(request("/health", "origin: https://a.example"))
        assert "access-control-allow-origin" not in answer.headers


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Sends an answer without end; says in the scope's `state` which client asks."""
    owner = str(scope["state"]["certificate"]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"owner", owner)]})
    while True:
        await send({"type": "http.response.body", "body": b"x" * 5000, "more_body": True})
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_the_task_of_a_client_that_leaves_or_does_not_read_ends(
    is_encrypted: bool, leaves: bool, authority: Authority
) -> None:
    limits = Limits(write_s=60.0 if leaves else 0.3)
    files = authority.sign("server", authority.folder / "server") if is_encrypted else None
    context = ssl.create_default_context(cafile=authority.certificate) if is_encrypted else None
    with open_port(app=endless, tls=files, limits=limits) as port:
        client = port.connect(context, buffer=4096)
        client.sendall(HEALTH)
        stream = client.makefile("rb")
        assert len(stream.read(100_000)) == 100_000
        assert port.held()[:2] == (1, 1)
        if leaves:
            stream.close()
            client.close()
        wait_until(lambda: port.held() == (0, 0, 0), WAIT_S)
        client.close()


async def silent(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers in an hour."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(3600)


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_client_leaves_that_has_sent_two_requests(size: int) -> None:
    with open_port(app=silent) as port:
        with port.connect() as client:
            client.sendall(posted(b"x" * size) + HEALTH)
            wait_until(lambda: port.held() == (1, 1, 1), WAIT_S)
        wait_until(lambda: port.held() == (0, 0, 0), WAIT_S)


def test_certificates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's certificate names it; new files count for new connections."""
    live = TlsFiles(str(tmp_path / "c"), str(tmp_path / "k"), str(tmp_path / "ca"))
    other = Authority.make(tmp_path / "other", "other")

    def install(by: Authority, name: str) -> None:
        files = by.sign(name, tmp_path / name)
        files.install(live)
        shutil.copy(by.certificate, str(live.client_authority))

    def owner(by: Authority, client: TlsFiles | None) -> str:
        """The name that a server of this authority knows; empty: it ends the connection."""
        context = ssl.create_default_context(cafile=by.certificate)
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        try:
            with port.connect(context) as connection:
                connection.sendall(HEALTH)
                head = connection.makefile("rb").read(1000).decode()
        except OSError:
            return ""
        return head.partition("owner: ")[2].partition("\r\n")[0]

    alice, bob = authority.sign("alice", tmp_path / "a"), other.sign("bob", tmp_path / "b")
    install(authority, "first")
    monkeypatch.setattr(auth, "_POLL_S", 0.01)
    with open_port(app=endless, tls=live) as port:
        assert [owner(authority, client) for client in (alice, None, bob)] == ["alice", "", ""]
        install(other, "second")
        wait_until(lambda: owner(other, bob) == "bob", WAIT_S)
        assert owner(other, alice) == ""
        Path(live.key).write_text("not a key")
        assert owner(other, bob) == "bob"


def test_a_handshake_that_fails_is_told(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the client by an alert, and to the operator by a line, of which there are few."""
    lines: list[str] = []
    monkeypatch.setattr(http_server.logger, "warning", lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(http_server, "_told_at", collections.deque(maxlen=4))
    monkeypatch.setattr(http_server, "_LINES", 4)
    server = authority.sign("server", tmp_path)
    files = TlsFiles(server.certificate, server.key, str(authority.certificate))
    stranger = Authority.make(tmp_path / "other", "other").sign("bob", tmp_path / "b")
    newest, older = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2
    with open_port(app=endless, tls=files) as port:
        for client, version, alert in (
            (None, newest, "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
            (None, older, "SSLV3_ALERT_HANDSHAKE_FAILURE"),
            (stranger, newest, "TLSV1_ALERT_UNKNOWN_CA"),
            (stranger, older, "TLSV1_ALERT_UNKNOWN_CA"),
            (None, newest, "TLSV13_ALERT_CERTIFICATE_REQUIRED"),
        ):
            context = ssl.create_default_context(cafile=authority.certificate)
            context.maximum_version = version
            if client is not None:
                context.load_cert_chain(client.certificate, client.key)
            with pytest.raises(ssl.SSLError) as raised:
                port.send(HEALTH, context)
            assert raised.value.reason == alert
        with port.connect() as plain:
            plain.sendall(HEALTH)
            assert plain.recv(1) == b"", "OpenSSL has no alert for it"
    assert [line.count(f"at {LOCAL} failed") for line in lines] == [1] * 4
    for line, cause in zip(lines, ["did not return"] * 2 + ["verify failed"] * 2, strict=True):
        assert cause in line


def test_broken_connections_leave_nothing(port: OpenPort) -> None:
    """Parts of requests, on connections that end in each way."""
    whole = posted(b'{"prompt": "a"}')
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        client = port.connect()
        client.sendall(whole[: number % len(whole)])
        if number % 3 == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        elif number % 3 == 1:
            client.shutdown(socket.SHUT_WR)
        client.close()
    wait_until(lambda: port.held() == (0, 0, 0), WAIT_S)
    assert port.send(HEALTH).status == 200
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, WAIT_S)


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_port(host="::1") as port:
        assert port.send(HEALTH).status == 200
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        server = http_server.HttpServer(in_parts, Limits())
        with pytest.raises(ConfigError, match="--http-port"):
            ServerArgs(port=0, http_port=number).check_ports()
        with pytest.raises(ConfigError, match="--http-port"):
            asyncio.run(server.start("127.0.0.1", number, None))
    # A name may have addresses that this machine lacks, as localhost has where IPv6 is off, or the
    # same twice.
    names = ("192.0.2.7", "127.0.0.1", "127.0.0.1")
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in names]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    with open_port() as port:
        assert port.send(HEALTH).status == 200


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(api_key=f"{ONE}, {ADMIN}", http_port=0, cors_origin="https://a, https://b")
    args.check()
    assert args.cors_origins() == ["https://a", "https://b"]
    for token in (ONE, ADMIN):
        assert args.authenticator().identify([f"Bearer {token}"], None).owner.name != "anonymous"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = r"starlette, uvicorn, httptools, orjson; .* its extra http"
    with pytest.raises(ConfigError, match=missing):
        args.check()


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *(("localhost:8000", True), ("LocalHost.", True), ("a.localhost", True), ("", True)),
        *(("127.0.0.1:1", True), ("[::1]:80", True), ("10.1.2.3", True), ("Box.example:1", True)),
        *(("evil.example", False), ("127.0.0.1.nip.example", False), ("localhost.evil", False)),
        *(("xlocalhost:8000", False), ("[evil", False), ("sub.box.example", False)),
    ],
)
def test_names_of_a_server_that_every_page_reaches(host: str, is_own: bool) -> None:
    assert is_own_host(host, ["box.example"]) == is_own
    assert is_own_host(host, ["*"])


def test_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Authenticator([ONE])
    for args, hosts in (
        (ServerArgs(), ["127.0.0.1"]),
        (
            ServerArgs(host="localhost", allowed_hosts="A.example, b"),
            ["localhost", "a.example", "b"],
        ),
        (ServerArgs(host="0.0.0.0", insecure=True), ["*"]),
        (ServerArgs(tls_cert="a", tls_key="b"), ["*"]),
    ):
        assert args.hosts(Authenticator()) == hosts
    assert ServerArgs().hosts(known) == ["*"]
    assert ServerArgs(allowed_hosts="b").hosts(known) == ["127.0.0.1", "b"]
    evil = [b"host: evil.example", b"host: localhost\r\nhost: evil.example"]
    with open_port(hosts=("127.0.0.1",)) as port:
        for path, host in itertools.product(("/", "/health", "/v1/models", "/none"), evil):
            answer = port.send(request(path).replace(b"host: localhost", host))
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
            assert "--allowed-hosts" in answer.error["message"]
        assert port.send(HEALTH).status == 200
    number, close = open_metrics_port(0, ServerState(["none"], 1.0), ["127.0.0.1"])
    for host, status in (("evil.example", 403), ("localhost", 200)):
        page = http.client.HTTPConnection(LOCAL, number, timeout=WAIT_S)
        page.request("GET", "/metrics", headers={"host": host})
        answer = page.getresponse()
        assert answer.status == status
        assert (b"start it with --allowed-hosts" in answer.read()) == (status == 403)
        page.close()
    close()


async def in_parts(scope: Any, receive: Any, send: Any) -> None:
    """Sends two parts; then another path than / ends too early, or with an error."""
    length = [(b"content-length", b"6")] if scope["path"] == "/long" else []
    await send({"type": "http.response.start", "status": 200, "headers": length})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    if scope["path"] == "/error":
        raise ZeroDivisionError
    if scope["path"] == "/never":
        await asyncio.sleep(WAIT_S)
    if scope["path"] in ("/", "/long", "/large"):
        rest = b"x" * (16 << 20) if scope["path"] == "/large" else b""
        await send({"type": "http.response.body", "body": rest})


@pytest.mark.parametrize("path", ["/", "/long", "/short", "/error", "/never", "/large"])
def test_a_reader_of_http_1_0_can_tell_a_body_that_is_cut(path: str) -> None:
    with open_port(app=in_parts) as port, port.connect() as client:
        client.sendall(request(path).replace(b"HTTP/1.1", b"HTTP/1.0"))
        said = b""
        while (b"twox" if path == "/large" else b"two") not in said:
            said += client.recv(4096)
        if path in ("/never", "/large"):  # the system takes only a part of the large one
            port.run(port.server.close(0))
        if path in ("/", "/long"):
            assert client.recv(4096) == b""
        else:
            with pytest.raises(ConnectionResetError):
                collections.deque(iter(partial(client.recv, 1 << 16), b""), 0)
        head, _, body = said.partition(b"\r\n\r\n")
        assert (body.rstrip(b"x"), b"connection: close" in head) == (b"onetwo", True)
        assert b"transfer-encoding" not in head


DATA = b"data: 1\n\n"


class Late(_EventStream):
    """A stream of one part, which is silent before and after it, and then fails."""

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._breaking_silence(send):
            for event in scope["events"]:
                await event.wait()
                await self._send_part(send, DATA)
            raise QueueFullError("the queue is full")


def test_a_silent_stream_gets_comments() -> None:
    """Before its first token and later. An error after a comment is an event."""
    events = [asyncio.Event(), asyncio.Event()]

    async def late(scope: Any, receive: Any, send: Any) -> None:
        call = Request({**scope, "state": {"request_id": "it", "send": send}})
        state = ServerState(["none"], 1.0, limits=Limits(sse_ping_s=0.01))
        await Late(request=call, state=state)({**scope, "events": events}, receive, send)

    async def go_on(event: asyncio.Event) -> None:
        event.set()

    with open_port(app=late) as port, port.connect() as client, client.makefile("rb") as stream:

        def chunk() -> bytes:
            size = int(stream.readline(), 16)
            return stream.read(size + 2)[:size]  # type: ignore[no-any-return]

        client.sendall(HEALTH)
        head = set(iter(stream.readline, b"\r\n"))
        assert {b"x-accel-buffering: no\r\n", b"transfer-encoding: chunked\r\n"} <= head
        for event in events:
            assert {chunk() for _ in range(3)} == {openai_routes._COMMENT}
            port.run(go_on(event))
            assert next(part for part in iter(chunk, b"") if part != openai_routes._COMMENT) == DATA
        *_, last = iter(chunk, b"")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "rate_limit_exceeded"
