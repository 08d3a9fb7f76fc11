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
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import NoReturn

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
