"""TLS between the driver and ranks of a Ray cluster: an option, off by default.

`TPENGINE_RANK_TLS` names a folder that every machine has, with `tls.crt`, `tls.key` and `ca.crt`.
Each end shows its certificate, and takes the other's if that authority has signed it. So the
authority should sign nothing else. Names in certificates do not count: the group's secret proves
which end speaks (`channel`). What ranks exchange among themselves, by gloo or NCCL, stays plain.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path

from tpengine import envs
from tpengine.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


def secured(sock: socket.socket, is_driver: bool) -> socket.socket:
    """Returns the connection with TLS, or unchanged if no TLS is wanted. Waits for the TLS
    handshake, at most for the socket's timeout.

    Raises:
        OSError: the certificates cannot be used now, or the handshake fails, as with a peer that
            shows no valid certificate or does not answer.
    """
    folder = envs.rank_tls()
    if folder is None:
        return sock
    return _context(folder, is_driver).wrap_socket(sock, server_side=is_driver)


def check() -> None:
    """Raises OSError if TLS is wanted and the certificates cannot be used now."""
    if (folder := envs.rank_tls()) is not None:
        _context(folder, is_driver=True)


def check_at_start() -> None:
    """Raises ConfigError instead, as nothing shows yet that they ever could be used. A handshake in
    memory tells whether the certificate is valid at both ends."""
    if (folder := envs.rank_tls()) is None:
        return
    try:
        to_driver, to_rank = ssl.MemoryBIO(), ssl.MemoryBIO()
        driver = _context(folder, is_driver=True).wrap_bio(to_driver, to_rank, server_side=True)
        rank = _context(folder, is_driver=False).wrap_bio(to_rank, to_driver)
        for end in (rank, driver, rank, driver):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"TPENGINE_RANK_TLS = {str(folder)!r}: {CERTIFICATE} is not valid by {AUTHORITY}: "
            f"{error.verify_message}; have it signed again"
        ) from error
    except OSError as error:
        raise ConfigError(str(error)) from error


def _context(folder: Path, is_driver: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_driver else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:  # ssl.SSLError is one
        raise OSError(
            f"TPENGINE_RANK_TLS = {str(folder)!r} cannot be used on {socket.gethostname()}: "
            f"{error}; put {CERTIFICATE}, {KEY} and {AUTHORITY} into it, in PEM form"
        ) from error
    return context


class TlsEnd:
    """What a `Channel` uses of its socket. Sending and receiving never wait.

    OpenSSL's object is not made for a thread that sends while another one receives; hence the lock.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()

    def settimeout(self, value: float | None) -> None:
        """Does nothing: a channel says in each call that it does not wait."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview, flags: int) -> int:
        """Sends some of the data; raises BlockingIOError if nothing can be sent now."""
        with self._lock:
            try:
                return self._sock.send(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error

    def recv(self, size: int, flags: int) -> bytes:
        """Returns what has arrived, empty at the end; raises BlockingIOError if nothing has."""
        with self._lock:
            try:
                return self._sock.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                raise BlockingIOError from error

    def shutdown(self, how: int) -> None:
        """Ends the connection, which ends the `poll` of a thread that receives."""
        with self._lock:
            self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


def end_of(sock: socket.socket) -> socket.socket | TlsEnd:
    """What a channel takes, after the handshakes."""
    return TlsEnd(sock) if isinstance(sock, ssl.SSLSocket) else sock
