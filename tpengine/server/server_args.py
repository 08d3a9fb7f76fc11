"""`ServerArgs`: what `tpengine serve` may be told besides the engine's arguments."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from tpengine import envs
from tpengine.async_engine.admission import QueueLimits
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import ConfigError
from tpengine.options import Options, option
from tpengine.server.auth import Authenticator, read_tokens
from tpengine.server.limits import DEFAULT_MESSAGE_BYTES, Limits
from tpengine.server.ports import check_port
from tpengine.server.tls import TlsFiles

MAX_PORT = 65535
MAX_MESSAGE_MIB = 1024
MAX_QUEUED = (1 << 63) - 1
"""As much as the protocol can say."""
_QUEUE = QueueLimits()


@dataclass
class ServerArgs(Options):
    """Arguments of a server; each is also a command-line option (`drain_timeout` is
    `--drain-timeout`), with the same default and the help text given here."""

    group: ClassVar[str] = "server"

    host: str = option("127.0.0.1")
    """Address to listen on, 0.0.0.0: all; any but loopback wants TLS, a token or --insecure."""
    port: int = option(50051, at_least=0, at_most=MAX_PORT)
    """Port to listen on; 0 takes a free one, which is printed."""
    served_model_name: str | None = option(None)
    """The model's name for clients; default: the folder's or the hub's."""
    token_file: str | None = option(None)
    """Bearer tokens of clients, one per line, at least 16 characters each, as from `openssl rand
    -hex 24`; without one, and without TPENGINE_TOKENS (separated by commas), no client needs
    any."""
    admin_token_file: str | None = option(None)
    """The token for Drain and for Abort of other clients' requests; default: TPENGINE_ADMIN_TOKEN,
    or none, and then nobody may."""
    tls_cert: str | None = option(None)
    """PEM file of the server's certificate and its chain; read again when it changes."""
    tls_key: str | None = option(None)
    """PEM file of its key."""
    tls_client_ca: str | None = option(None)
    """PEM file of the authority that signs clients' certificates: mutual TLS."""
    insecure: bool = option(False)
    """Listen beyond this machine without TLS and without tokens."""
    max_queued_requests: int = option(_QUEUE.max_requests, at_most=MAX_QUEUED)
    """Most requests that wait to start; more are refused."""
    max_queued_tokens: int = option(_QUEUE.max_tokens, at_most=MAX_QUEUED)
    """Most prompt tokens that wait to start; more are refused."""
    max_message_mib: float = option(
        DEFAULT_MESSAGE_BYTES / (1 << 20), more_than=0, at_most=MAX_MESSAGE_MIB
    )
    """Largest request in MiB, after decompression."""
    drain_timeout: float = option(30.0, at_least=0, unit=" seconds")
    """Seconds that running requests get to finish after SIGTERM, SIGINT or Drain."""
    startup_timeout: float = option(1800.0, at_least=0, unit=" seconds")
    """Seconds until the server must be ready, or it ends with exit code 1."""
    metrics_port: int | None = option(None, at_least=0, at_most=MAX_PORT)
    """Port for Prometheus on 127.0.0.1, at /metrics; 0 takes a free one; default: none."""
    disable_log_requests: bool = option(False)
    """No line in the log when a request ends."""

    def check(self) -> None:
        """Refuses what cannot be, and what would be open to strangers.

        Raises:
            ConfigError: see the message.
        """
        super().check()
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both, or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")

    def check_exposure(self, authenticator: Authenticator) -> None:
        """Refuses to serve strangers without having been told to.

        Raises:
            ConfigError: the address is not loopback, and anybody could use the server.
        """
        is_guarded = self.tls_cert is not None or authenticator.wants_token
        if is_loopback(self.host) or is_guarded or self.insecure:
            return
        raise ConfigError(
            f"host = {self.host} can be reached from other machines, and anybody there could use "
            "the model; give --tls-cert and --tls-key, or --token-file, or say --insecure, or "
            "listen on 127.0.0.1"
        )

    def check_ports(self) -> None:
        """Refuses ports that cannot be had now.

        Raises:
            ConfigError: see `check_port`.
        """
        check_port(self.host, self.port)
        if self.metrics_port is not None:
            check_port("127.0.0.1", self.metrics_port, "--metrics-port")

    def tls_files(self) -> TlsFiles | None:
        """The files, if TLS is wanted."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def limits(self) -> Limits:
        """What a request may hold, and the queue.

        Raises:
            ConfigError: a limit of the queue is below 1.
        """
        return Limits(
            max_message_bytes=int(self.max_message_mib * (1 << 20)),
            queue=QueueLimits(self.max_queued_requests, self.max_queued_tokens),
        )

    def authenticator(self) -> Authenticator:
        """Knows the tokens.

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

    def model_name(self, model: str) -> str:
        """The name under which `model`, a folder or a hub's name, is served."""
        if self.served_model_name is not None:
            return self.served_model_name
        if model == EMBEDDED_MODEL:
            return "embedded"
        name = model.rstrip("/")
        return name.rpartition("/")[2] if model.startswith(("/", ".", "~")) else name

    def address(self) -> str:
        """Host and port as gRPC wants them."""
        return join_address(self.host, self.port)


def join_address(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name other than localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
