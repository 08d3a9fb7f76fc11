"""URLs of pictures are read only from where the operator allows it, and within limits."""

from __future__ import annotations

import base64
import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.guarded import Authority
from support.messages import said
from support.waiting import PATIENCE_S
from support.web import Answer, web_server

from tpengine.errors import InvalidPictureError
from tpengine.pictures import sources
from tpengine.pictures.picture import PictureLimits
from tpengine.pictures.sources import read_source

LIMITS = PictureLimits(max_bytes=100_000, timeout_s=PATIENCE_S)
DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()
PRIVATE = """127.0.0.1 127.8.8.8 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0
    224.0.0.1 255.255.255.255 240.0.0.1 192.0.2.1 198.18.0.1 ::1 :: fe80::1 fe80::1%eth0 fc00::1
    fec0::1 ff02::1 ff0e::1 ::ffff:8.8.8.8 ::ffff:127.0.0.1 ::8.8.8.8 64:ff9b::7f00:1
    64:ff9b:1::1 2002:7f00:1::1 2001::1 2001:db8::1"""


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f" DATA:Image/SVG+xml;charset=utf-8;BASE64,{BASE64}\n",
        f"data:image/jpeg ; name=a.jpg ; base64 ,{BASE64.rstrip('=')}",
        f"data:image/*;base64,{BASE64[:76]}\r\n {BASE64[76:]}",
        f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('=', '%3D')}%0A",
    ],
)
def test_data_is_read(url: str) -> None:
    assert read_source(url, LIMITS, ()) == DATA


REFUSED = {
    "data:image/TYPE;base64,": [
        *(f"data:{head},{BASE64}" for head in ("text/plain;base64", ";base64", "image/png")),
        f"data:image/png;base64;a=b,{BASE64}",
    ],
    "no valid base64": [
        f"data:image/png;base64,{body}"
        for body in (f"{BASE64}!", "secret=secret", "abcde", "\xe9\xe9\xe9\xe9")
    ],
    "more than 100000 bytes": [f"data:image/png;base64,{'A' * 133_340}"],
    "begins with data:image/, https:// or http://": [
        *("file:///etc/passwd", "/etc/passwd", "", "ftp://a.example/a.png"),
    ],
    "not valid": ["http://[::1/a", "http://a.example:99999/a"],
    "user's name": ["https://user:secret@a.example/", "https://secret@a.example/"],
    "host or port": [
        *("https://b.example/", "https://a.example.b.example/", "https://a.example:22/"),
        *("http://127.0.0.1/", "http:///a.png", "http://2130706433/", "http://c.example/"),
    ],
}


@pytest.mark.parametrize("text", REFUSED)
def test_other_urls_are_refused(text: str) -> None:
    for url in REFUSED[text]:
        with pytest.raises(InvalidPictureError, match=text) as raised:
            read_source(url, LIMITS, ["a.example", "*.c.example"])
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_hosts_are_allowed_by_name_and_port(is_allowed: bool) -> None:
    entries = ["A.example.", "b.example:8080", "*.c.example", "[::1]:81"]
    yes = "a.example/443 a.example/80 b.example/8080 x.y.c.example/443 ::1/81"
    no = "a.example/8080 b.example/80 c.example/443 xc.example/443 ::1/80 /443"
    for place in (yes if is_allowed else no).split():
        host, port = place.split("/")
        assert sources._is_allowed(host, int(port), entries) is is_allowed, place
        assert not sources._is_allowed(host, int(port), ())


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Has every name resolved to these addresses; returns the names that are asked for."""
    names: list[str] = []

    def resolver(host: str, port: int, **_: Any) -> list[Any]:
        names.append(host)
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(sources.socket, "getaddrinfo", resolver)
    return names


@pytest.mark.parametrize("address", PRIVATE.split())
def test_names_of_private_addresses_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    """The log says why, the error does not."""
    names = resolve_to(monkeypatch, "8.8.8.8", address)
    monkeypatch.setattr(sources.socket, "create_connection", lambda *_: pytest.fail("connected"))
    words = r"'https://a\.example/p' could not be fetched; [^(]*$"
    with said(caplog) as lines, pytest.raises(InvalidPictureError, match=words):
        read_source("https://a.example/p?key=secret", LIMITS, ["a.example"])
    assert len(lines) == 1
    assert "'https://a.example/p' could" in lines[0]
    assert "not public" in lines[0]
    assert names == ["a.example"]


def test_the_checked_address_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = resolve_to(monkeypatch, "2606:2800:220:1::1", "8.8.8.8")
    asked: list[Any] = []

    def connect(place: Any, timeout: float) -> None:
        asked.append(place)
        raise OSError

    monkeypatch.setattr(sources.socket, "create_connection", connect)
    with pytest.raises(InvalidPictureError):
        read_source("http://a.example/", LIMITS, ["a.example"])
    assert asked == [("2606:2800:220:1::1", 80), ("8.8.8.8", 80)]
    assert names == ["a.example"]


def answer(handler: Any) -> Answer:
    """By the path: what `ANSWERS` has for it."""
    handler.server.seen.append((handler.path, dict(handler.headers)))
    return ANSWERS.get(handler.path.partition("?")[0], (400, {}, []))


ANSWERS: dict[str, Answer] = {
    "/good": (200, {"Content-Length": "256"}, [DATA]),
    "/unsized": (200, {}, [DATA]),
    "/chunked": (200, {"Transfer-Encoding": "chunked"}, [b"100\r\n", DATA, b"\r\n0\r\n\r\n"]),
    "/moved": (302, {"Location": "/good"}, [DATA]),
    "/missing": (404, {}, [DATA]),
    "/large": (200, {"Content-Length": "100001"}, []),
    "/endless": (200, {}, itertools.repeat(bytes(1000))),
    "/short": (200, {"Content-Length": "300"}, [DATA]),
    "/zipped": (200, {"Content-Encoding": "gzip"}, [DATA]),
    "/headers": (200, {"X": "x" * 70_000}, [DATA]),
}


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    with web_server(answer) as server:
        server.seen = []  # type: ignore[attr-defined]
        yield server


def fetch(web: Any, path: str) -> bytes:
    host = f"127.0.0.1:{web.server_port}"
    return read_source(f"http://{host}{path}", LIMITS, [host])


def test_answers_are_read(web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    web.seen.clear()
    for path in ("/good?a=%20 \xe9&b#c", "/unsized", "/chunked"):
        assert fetch(web, path) == DATA
    path, headers = web.seen[0]
    assert path == "/good?a=%20%20%C3%A9&b"
    assert headers == {"Host": f"127.0.0.1:{web.server_port}", "Accept-Encoding": "identity"}


OTHER_ANSWERS = {
    "/moved": "status 302; redirects are not followed",
    "/missing": "status 404",
    "/large": "more than 100000 bytes",
    "/endless": "more than 100000 bytes",
    "/short": "could not be fetched;",
    "/zipped": "sent compressed",
    "/headers": "could not be fetched;",
    f"/good\r\nX: y{'z' * 99}": "could not be fetched;|status 400",
}


@pytest.mark.parametrize("path", OTHER_ANSWERS)
def test_other_answers_are_refused(web: Any, path: str) -> None:
    web.seen.clear()
    with pytest.raises(InvalidPictureError, match=OTHER_ANSWERS[path]) as raised:
        fetch(web, path)
    assert len(web.seen) <= 1
    assert all("X" not in headers for _, headers in web.seen)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_slow_answer_ends_with_the_time_in_all(start: bytes, scheme: str) -> None:
    """The server sends a byte whenever the last one was taken, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(start)
                while start and not over.wait(0.05):
                    connection.sendall(b"a")
                over.wait(PATIENCE_S)

        over = threading.Event()
        thread = threading.Thread(target=drip)
        thread.start()
        host = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InvalidPictureError, match=r"could not be fetched( within 0\.4 s)?;"):
            read_source(f"{scheme}://{host}/", PictureLimits(timeout_s=0.4), [host])
        over.set()
        thread.join(PATIENCE_S)


def test_tls_verifies_the_name_at_the_checked_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.make(tmp_path)
    files = authority.sign("a", tmp_path)  # for `localhost`
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(files.certificate, files.key)
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    resolve_to(monkeypatch, "8.8.8.8")
    with web_server(answer, served) as server:
        server.seen = []  # type: ignore[attr-defined]

        def connect(place: tuple[str, int], timeout: float) -> socket.socket:
            assert place == ("8.8.8.8", 443)
            connection = socket.socket()
            connection.connect(server.server_address)
            return connection

        monkeypatch.setattr(sources.socket, "create_connection", connect)
        for host in ("localhost", "a.example"):
            with pytest.raises(InvalidPictureError, match="could not be fetched;"):
                read_source(f"https://{host}/good", LIMITS, [host])
        monkeypatch.setattr(sources.ssl, "create_default_context", lambda: trusted)
        with pytest.raises(InvalidPictureError, match="could not be fetched;"):
            read_source("https://a.example/good", LIMITS, ["a.example"])
        assert read_source("https://localhost/good", LIMITS, ["localhost"]) == DATA
        assert server.seen[0][1]["Host"] == "localhost"  # type: ignore[attr-defined]


def test_a_resolver_that_hangs_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(sources.socket, "getaddrinfo", lambda *_, **__: over.wait(PATIENCE_S))
    with pytest.raises(InvalidPictureError, match=r"within 0\.1 s"):
        read_source("https://a.example/", PictureLimits(timeout_s=0.1), ["a.example"])
    over.set()
