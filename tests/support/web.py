"""A web server in this process."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Answer = tuple[int, Mapping[str, str], Iterable[bytes]]
"""Status, headers, and the body in pieces."""


@contextmanager
def web_server(
    answer: Callable[[BaseHTTPRequestHandler], Answer], tls: ssl.SSLContext | None = None
) -> Iterator[ThreadingHTTPServer]:
    """A server on a free port of this machine that answers GET and HEAD."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the reader has enough
                for piece in body if self.command == "GET" else ():
                    self.wfile.write(piece)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
