"""TLS of the HTTP port.

Connections are accepted here and not by the event loop, which closes one whose handshake fails
before it has sent the alert, and tells nothing of it.
"""

from __future__ import annotations

import asyncio
import collections
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

from tpengine.logger import init_logger
from tpengine.server.auth import CertificateReloader

logger = init_logger(__name__)

_PAUSE_S = 0.1
_LINES, _LINES_S = 20, 60.0
"""Most log lines about handshakes in so many seconds: any client can cause them."""
_MAX_CAUSE = 200
_PEER: ContextVar[str] = ContextVar("peer")
"""Address of the client of a connection."""
_told_at: collections.deque[float] = collections.deque(maxlen=_LINES)


class TlsListener:
    """Accepts connections at a socket, until it is closed.

    Args:
        sock: bound to its address; it is closed with the listener.
        make_protocol: called for each connection; the protocol begins after the handshake.
        certificates: of the server.
        handshake_s: longest time of a handshake.
        backlog: connections that may wait for the listener.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        certificates: CertificateReloader,
        handshake_s: float,
        backlog: int,
    ) -> None:
        sock.listen(backlog)
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        options: dict[str, Any] = {"ssl_handshake_timeout": handshake_s}
        options["ssl"] = _context(certificates)
        connect = partial(self._loop.connect_accepted_socket, make_protocol, **options)
        self._start(self._accept(sock, connect))

    def close(self) -> None:
        """Takes no more connections, and ends those whose handshake is not complete."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, sock: socket.socket, connect: Callable[..., Any]) -> None:
        with sock:
            while True:
                try:
                    connection, address = await self._loop.sock_accept(sock)
                except OSError:  # no descriptor is left, or the client has gone already
                    await asyncio.sleep(_PAUSE_S)
                    continue
                _PEER.set(address[0])
                self._start(connect(connection))

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the client has left, or its handshake has failed


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
