"""Prometheus' port: HTTP on loopback, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tpengine.errors import ConfigError

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_READ_TIMEOUT_S = 5.0


class MetricsPort:
    """Serves a text at /metrics until it is closed.

    Args:
        port: 0 takes a free one.
        text: makes the text; called on this server's threads.

    Attributes:
        port: where it listens, on 127.0.0.1.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, port: int, text: Callable[[], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_TIMEOUT_S  # a client that says nothing holds a thread for no longer
            server_version = "tpengine"
            sys_version = ""

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "only /metrics is here")
                    return
                body = text()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape every few seconds is nothing to write about."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ConfigError(
                f"metrics_port = {port} cannot be had: {error}; choose another"
            ) from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tpengine-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_READ_TIMEOUT_S)
