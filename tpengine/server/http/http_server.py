"""The HTTP server: uvicorn's protocol on the event loop and the sockets of this process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from tpengine.errors import ConfigError
from tpengine.server.auth import CertificateReloader
from tpengine.server.http.protocol import Connections, HttpProtocol
from tpengine.server.http.tls import accept_tls
from tpengine.server.limits import Limits
from tpengine.server.server_args import check_port

_BACKLOG = 2048
_POLL_S = 0.01
_SOCKET_OPTIONS = (  # accepted connections inherit them
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    # A client whose machine has died sends no end of its connection.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    # Else the system takes up to 4 MiB for a client that reads nothing: a whole stream, for which
    # --write-timeout would never begin.
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 64 << 10),
)


class HttpServer:
    """One HTTP server. Created in the event loop that serves it; listens nowhere at first.

    uvicorn's own `Server` is not used: it installs signal handlers and wakes the loop ten times a
    second.

    Args:
        app: that answers, see `make_app`.
        limits: of its connections.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # it may be a fraction
        )
        # What it reports are faults of clients, and errors that the application has logged.
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        self._config.load()
        self._limits = limits
        self._connections = Connections(limits)
        self._stop_accepting: list[Callable[[], object]] = []

    async def start(self, host: str, port: int, tls: CertificateReloader | None) -> int:
        """Binds the port, answers from now on, and returns the port.

        Raises:
            ConfigError: the port is taken, or the address is not one of this machine.
        """
        make_protocol = partial(HttpProtocol, self._config, self._connections, {})
        try:
            sockets = await asyncio.to_thread(_bind, host, port, self._limits.write_s)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error}; choose another with --http-port"
            ) from error
        for sock in sockets:
            if tls is None:
                create = asyncio.get_running_loop().create_server
                listener = await create(make_protocol, sock=sock, backlog=_BACKLOG)
                self._stop_accepting.append(listener.close)
            else:
                sock.listen(_BACKLOG)
                accepting = accept_tls(sock, make_protocol, tls, self._limits.head_s)
                self._stop_accepting.append(asyncio.create_task(accepting).cancel)
        return int(sockets[0].getsockname()[1])

    async def close(self, grace_s: float) -> None:
        """Takes no more connections, and ends the open ones: within this time if they are
        answered, else then."""
        for stop in self._stop_accepting:
            stop()
        for connection in list(self._connections.connections):
            connection.shutdown()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while self._connections.connections and loop.time() < end:
            await asyncio.sleep(_POLL_S)
        for connection in list(self._connections.connections):
            connection.transport.abort()


def _bind(host: str, port: int, write_s: float) -> list[socket.socket]:
    """Sockets for those addresses of a name that this machine has, on the same port.

    Args:
        write_s: longest time in which a client that has an answer to read takes nothing of it.
    """
    unread = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000))
    sockets: list[socket.socket] = []
    for family, address in check_port(host, port, "--http-port"):
        sock = socket.socket(family, socket.SOCK_STREAM)
        for option in (*_SOCKET_OPTIONS, unread):
            sock.setsockopt(*option)
        own_port = sockets[0].getsockname()[1] if sockets else port
        sock.bind((address[0], own_port, *address[2:]))
        sockets.append(sock)
    return sockets
