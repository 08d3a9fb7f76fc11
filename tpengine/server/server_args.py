"""`ServerArgs`: the options of `tpengine serve` in addition to the engine's, and their checks."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import ClassVar

from tpengine import envs
from tpengine.async_engine.admission import QueueLimits
from tpengine.errors import ConfigError
from tpengine.options import Options, option
from tpengine.server.auth import Authenticator, TlsFiles, read_tokens
from tpengine.server.limits import DEFAULT_MESSAGE_BYTES, Limits

MAX_PORT = 65535
MAX_MESSAGE_MIB = 1024
MAX_QUEUED = (1 << 63) - 1
"""The largest value of the protocol's int64 fields."""
_QUEUE = QueueLimits()


@dataclass
class ServerArgs(Options):
    """Arguments of a server; each is also a command-line option (`drain_timeout` is
    `--drain-timeout`), with the same default and the text below the field in `--help`."""

    group: ClassVar[str] = "server"

    host: str = option("127.0.0.1")
    """Address to listen on, 0.0.0.0: all; any but loopback needs TLS, a token or --insecure."""
    port: int = option(50051, at_least=0, at_most=MAX_PORT)
    """Port to listen on; 0 takes a free one, which is printed."""
    token_file: str | None = option(None)
    """Bearer tokens of clients, one per line, at least 16 characters each, as from `openssl rand
    -hex 24`; without it and without TPENGINE_TOKENS (separated by commas), clients need no
    token."""
    admin_token_file: str | None = option(None)
    """The token for Drain and for Abort of other clients' requests; default: TPENGINE_ADMIN_TOKEN;
    without any, these two are refused."""
    tls_cert: str | None = option(None)
    """PEM file of the server's certificate and its chain; read again when it changes."""
    tls_key: str | None = option(None)
    """PEM file of the certificate's key."""
    tls_client_ca: str | None = option(None)
    """PEM file of the authority that signs clients' certificates: mutual TLS."""
    insecure: bool = option(False)
    """Listen beyond this machine without TLS and without tokens."""
    max_queued_requests: int = option(_QUEUE.max_requests, at_most=MAX_QUEUED)
    """Most requests that may wait to start; more are refused."""
    max_queued_tokens: int = option(_QUEUE.max_tokens, at_most=MAX_QUEUED)
    """Most prompt tokens that may wait to start; more are refused."""
    max_message_mib: float = option(
        DEFAULT_MESSAGE_BYTES / (1 << 20), more_than=0, at_most=MAX_MESSAGE_MIB
    )
    """Largest request in MiB, after decompression."""
    drain_timeout: float = option(30.0, at_least=0, unit=" seconds")
    """Seconds that running requests get to finish after SIGTERM, SIGINT or Drain."""
    startup_timeout: float = option(1800.0, at_least=0, unit=" seconds")
    """Seconds until the server must be ready; later it ends with exit code 1."""
    metrics_port: int | None = option(None, at_least=0, at_most=MAX_PORT)
    """Port for Prometheus on 127.0.0.1, at /metrics; 0 takes a free one; default: none."""

    def check(self) -> None:
        """Checks each argument by itself, and that those of TLS are given together.

        Raises:
            ConfigError: a value is outside its limits, or one of a pair is missing.
        """
        super().check()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")

    def check_exposure(self, authenticator: Authenticator) -> None:
        """Refuses an address that other machines reach, if clients need neither TLS nor a token.

        Raises:
            ConfigError: any client in the network could use the server.
        """
        is_guarded = self.tls_cert is not None or authenticator.wants_token
        if is_loopback(self.host) or is_guarded or self.insecure:
            return
        raise ConfigError(
            f"host = {self.host} can be reached from other machines, and any client there could "
            "use the model; give --tls-cert and --tls-key, or --token-file, or say --insecure, or "
            "listen on 127.0.0.1"
        )

    def check_ports(self) -> None:
        """Checks that the ports are free, before anything slow is done.

        Raises:
            ConfigError: see `check_port`.
        """
        check_port(self.host, self.port)
        if self.metrics_port is not None:
            check_port("127.0.0.1", self.metrics_port, "--metrics-port")

    def tls_files(self) -> TlsFiles | None:
        """The certificate files; None: no TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def limits(self) -> Limits:
        """Bounds of a request and of the queue.

        Raises:
            ConfigError: a limit of the queue is below 1.
        """
        return Limits(
            max_message_bytes=int(self.max_message_mib * (1 << 20)),
            queue=QueueLimits(self.max_queued_requests, self.max_queued_tokens),
        )

    def authenticator(self) -> Authenticator:
        """Reads the tokens.

        Raises:
            ConfigError: a token file cannot be used.
        """
        return Authenticator(
            read_tokens(self.token_file, envs.tokens(), "--token-file (or TPENGINE_TOKENS)"),
            read_tokens(
                self.admin_token_file,
                envs.admin_token(),
                "--admin-token-file (or TPENGINE_ADMIN_TOKEN)",
            ),
        )

    def address(self) -> str:
        """HOST:PORT."""
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, only localhost counts as such."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Binds a port and releases it. gRPC's own error does not contain the system's reason.

    Args:
        host: an address of this machine, or a name.
        port: 0: any.
        option: the option to change, for the message.

    Raises:
        ConfigError: the port is taken or not permitted, or the address is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host = {host!r} is neither an address nor a known name: {error}"
        ) from error
    errors = [_bind_error(family, address) for family, *_, address in found]
    # A name may have addresses that this machine lacks (::1 without IPv6); no address may be taken.
    absent = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    refused = [one for one in errors if one is not None and one.errno not in absent]
    if refused:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {refused[0].strerror}; another process has the "
            f"port, or this user may not have it; choose another with {option}"
        )
    if None not in errors:
        raise ConfigError(
            f"cannot listen on {host}: it is not one of this machine; choose another with --host"
        )


def _bind_error(family: int, address: object) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            # As gRPC does: closed connections of an earlier server do not block the port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error
    return None
