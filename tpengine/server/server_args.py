"""`ServerArgs`: the options of `tpengine serve` in addition to the engine's, and their checks."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import ipaddress
import math
import os
import socket
import typing
from dataclasses import dataclass
from typing import Any

from tpengine import envs
from tpengine.arguments import arg
from tpengine.async_engine.admission import QueueLimits
from tpengine.config import EMBEDDED_MODEL
from tpengine.errors import ConfigError
from tpengine.server.auth import Authenticator, read_tokens
from tpengine.server.limits import DEFAULT_MESSAGE_BYTES, Limits
from tpengine.server.tls import TlsFiles

MAX_MESSAGE_MIB = 1024
MAX_QUEUED = (1 << 63) - 1
"""The largest value of the protocol's int64 fields."""
_QUEUE = QueueLimits()


@dataclass
class ServerArgs:
    """Arguments of a server; each is also a command-line option (`drain_timeout` is
    `--drain-timeout`), with the same default and the help text given here."""

    host: str = arg(
        "127.0.0.1",
        "address to listen on, 0.0.0.0: all; any but loopback needs TLS, a token or --insecure",
    )
    port: int = arg(50051, "port to listen on; 0 takes a free one, which is printed")
    served_model_name: str | None = arg(
        None, "the model's name for clients; default: the folder's or the hub's"
    )
    token_file: str | None = arg(
        None,
        "bearer tokens of clients, one per line, at least 16 characters each, as from `openssl "
        "rand -hex 24`; without it and without TPENGINE_TOKENS (separated by commas), clients "
        "need no token",
    )
    admin_token_file: str | None = arg(
        None,
        "the token for Drain and for Abort of other clients' requests; default: "
        "TPENGINE_ADMIN_TOKEN; without any, these two are refused",
    )
    tls_cert: str | None = arg(
        None, "PEM file of the server's certificate and its chain; read again when it changes"
    )
    tls_key: str | None = arg(None, "PEM file of the certificate's key")
    tls_client_ca: str | None = arg(
        None, "PEM file of the authority that signs clients' certificates: mutual TLS"
    )
    insecure: bool = arg(False, "listen beyond this machine without TLS and without tokens")
    max_queued_requests: int = arg(
        _QUEUE.max_requests, "most requests that may wait to start; more are refused"
    )
    max_queued_tokens: int = arg(
        _QUEUE.max_tokens, "most prompt tokens that may wait to start; more are refused"
    )
    max_message_mib: float = arg(
        DEFAULT_MESSAGE_BYTES / (1 << 20), "largest request in MiB, after decompression"
    )
    drain_timeout: float = arg(
        30.0, "seconds that running requests get to finish after SIGTERM, SIGINT or Drain"
    )
    startup_timeout: float = arg(
        1800.0, "seconds until the server must be ready; later it ends with exit code 1"
    )
    metrics_port: int | None = arg(
        None,
        "port for Prometheus on 127.0.0.1, at /metrics; 0 takes a free one; default: none",
    )
    disable_log_requests: bool = arg(False, "no line in the log when a request ends")

    def check(self) -> None:
        """Checks each argument by itself, and that those of TLS are given together.

        Raises:
            ConfigError: a value is out of its range, or one of a pair is missing.
        """
        for name in ("port", "metrics_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"{name} must be in [0, 65535], got {port}")
        for name in ("drain_timeout", "startup_timeout"):
            seconds = getattr(self, name)
            if not 0.0 <= seconds < math.inf:
                raise ConfigError(f"{name} must be at least 0 seconds and finite, got {seconds}")
        for name in ("max_queued_requests", "max_queued_tokens"):
            bound = getattr(self, name)
            if bound > MAX_QUEUED:
                raise ConfigError(f"{name} must be at most {MAX_QUEUED}, got {bound}")
        if not 0.0 < self.max_message_mib <= MAX_MESSAGE_MIB:
            raise ConfigError(
                f"max_message_mib must be more than 0 and at most {MAX_MESSAGE_MIB}, got "
                f"{self.max_message_mib}"
            )
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

    def model_name(self, model: str) -> str:
        """The name of `model`, a folder or a hub name, for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        if model == EMBEDDED_MODEL:
            return "embedded"
        name = model.rstrip("/")
        return name.rpartition("/")[2] if model.startswith(("/", ".", "~")) else name

    def address(self) -> str:
        """HOST:PORT."""
        return join_address(self.host, self.port)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one option per field."""
        group = parser.add_argument_group("server")
        types = typing.get_type_hints(cls)
        for spec in dataclasses.fields(cls):
            option = "--" + spec.name.replace("_", "-")
            kind = types[spec.name]
            options: dict[str, Any] = {"default": spec.default, "help": spec.metadata["help"]}
            if kind is bool:
                group.add_argument(option, action="store_true", **options)
                continue
            concrete = [one for one in typing.get_args(kind) if one is not type(None)] or [kind]
            if spec.default is not None:
                options["help"] += " (default: %(default)s)"
            group.add_argument(option, type=concrete[0], **options)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Takes its fields from parsed command-line arguments."""
        return cls(**{spec.name: getattr(args, spec.name) for spec in dataclasses.fields(cls)})


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
    failures = [failure for family, *_, where in found if (failure := _bind(family, where))]
    # A name may have addresses that this machine lacks (::1 without IPv6); no address may be taken.
    absent = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    refused = [failure for failure in failures if failure.errno not in absent]
    if refused or len(failures) == len(found):
        why = _explain((refused or failures)[0], port, option)
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}")


def _bind(family: int, address: object) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            # As gRPC does: closed connections of an earlier server do not block the port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error
    return None


def _explain(error: OSError, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port is taken by another process; choose another with {option}"
    if error.errno == errno.EACCES:
        return (
            f"permission denied: this user may not have port {port}; choose another with {option}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not one of this machine; choose another with --host"
    return os.strerror(error.errno or 0)
