"""The HTTP server: uvicorn's protocol on the event loop and the sockets of this process.

With TLS, connections are accepted here and not by the event loop, which closes one whose handshake
fails before it has sent the alert, and tells nothing of it.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.server.auth import CertificateReloader
from tpengine.server.http.protocol import Connections, HttpProtocol
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


logger = init_logger(__name__)

_PAUSE_S = 0.1
_LINES, _LINES_S = 20, 60.0
"""Most log lines about handshakes in so many seconds: any client can cause them."""
_MAX_CAUSE = 200
_PEER: ContextVar[str] = ContextVar("peer")
"""Address of the client of a connection."""
_told_at: collections.deque[float] = collections.deque(maxlen=_LINES)


async def accept_tls(
    sock: socket.socket,
    make_protocol: Callable[[], asyncio.Protocol],
    certificates: CertificateReloader,
    handshake_s: float,
) -> NoReturn:
    """Accepts connections at a socket until it is cancelled. Then it closes the socket, and ends
    the connections whose handshake is not complete.

    Args:
        sock: listens.
        make_protocol: called for each connection; the protocol begins after the handshake.
        certificates: of the server.
        handshake_s: longest time of a handshake.
    """
    loop, context = asyncio.get_running_loop(), _context(certificates)

    async def connect(connection: socket.socket, client: str) -> None:
        _PEER.set(client)
        with suppress(Exception):  # the client has left, or its handshake has failed
            await loop.connect_accepted_socket(
                make_protocol, connection, ssl=context, ssl_handshake_timeout=handshake_s
            )

    sock.setblocking(False)
    with sock:
        async with asyncio.TaskGroup() as connecting:
            while True:
                try:
                    connection, address = await loop.sock_accept(sock)
                except OSError:  # no descriptor is left, or the client has gone already
                    await asyncio.sleep(_PAUSE_S)
                else:
                    connecting.create_task(connect(connection, address[0]))


_WITHOUT_ALERT = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")
"""Clients that do not speak TLS get no alert, and are not waited for."""


class _ServerTls(ssl.SSLObject):
    """TLS of one connection. A handshake that fails looks like one that waits for the client, until
    the client sends more or leaves: so the event loop sends the alert."""

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            self._failure = error
            _tell(error)
            if error.reason in _WITHOUT_ALERT:
                raise
            raise ssl.SSLWantReadError from None


def _tell(failure: ssl.SSLError) -> None:
    now = time.monotonic()
    if len(_told_at) < _LINES or now > _told_at[0] + _LINES_S:
        _told_at.append(now)
        cause = str(failure)[:_MAX_CAUSE]
        logger.warning("the TLS handshake of a client at %s failed: %s", _PEER.get(), cause)


def _context(certificates: CertificateReloader) -> ssl.SSLContext:
    """A context that follows the files."""

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = certificates.context

    # OpenSSL calls it at every handshake, with and without a name.
    certificates.context.sni_callback = renew
    certificates.context.sslobject_class = _ServerTls
    return certificates.context
