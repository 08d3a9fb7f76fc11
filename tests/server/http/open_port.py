"""An HTTP server without an engine, in this process, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from server.guarded import WAIT_S, Run, TlsFiles, following, loop_on_a_thread
from tpengine.server.auth import Authenticator, CertificateReloader
from tpengine.server.http.app import make_app
from tpengine.server.http.http_server import HttpServer
from tpengine.server.limits import Limits
from tpengine.server.state import ServerState

LOCAL = "127.0.0.1"


class OpenPort:
    """A server that never leaves loading, on a loop of its own.

    Attributes:
        run: runs a coroutine on that loop.
        state: of the server; has the count of its open calls.
    """

    def __init__(
        self,
        run: Run,
        authenticator: Authenticator | None = None,
        limits: Limits | None = None,
        tls: CertificateReloader | None = None,
        host: str = LOCAL,
        cors: tuple[str, ...] = (),
        hosts: tuple[str, ...] = ("*",),
        app: Callable[..., Any] | None = None,
    ) -> None:
        self.run, self._host = run, host
        self.state = ServerState(["none"], 1.0, limits=limits or Limits())

        async def start() -> tuple[HttpServer, int]:
            own = make_app(self.state, authenticator or Authenticator(), cors, hosts)
            server = HttpServer(app or own, self.state.limits)
            return server, await server.start(host, 0, tls)

        self.server, self.port = run(start())
        self._own_tasks = run(_tasks())

    async def _held(self) -> tuple[int, int, int]:
        connections = self.server._connections
        tasks = (await _tasks()) - self._own_tasks
        return len(connections.connections), sum(connections.hosts.values()), len(tasks)

    def held(self) -> tuple[int, int, int]:
        """Open connections, by two counts, and tasks of the loop besides the server's own."""
        return self.run(self._held())  # type: ignore[no-any-return]

    def connect(self, tls: ssl.SSLContext | None = None, buffer: int = 0) -> socket.socket:
        connection = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        connection.settimeout(WAIT_S)
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect((self._host, self.port))
        return connection if tls is None else tls.wrap_socket(connection, server_hostname=LOCAL)

    def send(self, data: bytes, tls: ssl.SSLContext | None = None) -> Answer:
        """Sends bytes on a connection of their own, and reads the first answer."""
        with self.connect(tls) as connection:
            connection.sendall(data)
            return read_answer(connection.makefile("rb"))


async def _tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


@contextmanager
def open_port(tls: TlsFiles | None = None, **options: Any) -> Iterator[OpenPort]:
    """A server; when it has ended, nothing may be left."""
    with loop_on_a_thread() as run, following(run, tls) as certificates:
        port = OpenPort(run, tls=certificates, **options)
        try:
            yield port
        finally:
            run(port.server.close(0.2))
            left = port.held()
        assert left == (0, 0, 0)


class Answer:
    """One answer: its status, its headers in lower case and its body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape, with exactly its four fields."""
        body = json.loads(self.body)
        assert list(body) == ["error"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return body["error"]  # type: ignore[no-any-return]


def read_answer(stream: Any, has_body: bool = True) -> Answer:
    """The next answer of a connection; its length must be declared. Each has the id of its
    request."""
    line = stream.readline()
    assert line.startswith(b"HTTP/1.1 "), line
    headers = {}
    while (head := stream.readline()) != b"\r\n":
        name, _, value = head.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    assert headers["x-request-id"]
    body = stream.read(int(headers["content-length"])) if has_body else b""
    return Answer(int(line.split()[1]), headers, body)


def request(path: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    """The bytes of a request; its length is declared if it has a body."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def posted(body: bytes, *headers: str) -> bytes:
    """A JSON body for /tokenize."""
    head = ("content-type: application/json", *headers)
    return request("/tokenize", *head, method="POST", body=body)
