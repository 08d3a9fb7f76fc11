"""The connection of a client: target, TLS, token, keep-alive, and the errors of its calls: a gRPC
status becomes the error that the engine raises in process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import grpc

from tpengine.errors import ConfigError, ServerError, ServerUnavailableError, TPEngineError
from tpengine.proto.status_details import has_details, read_error

_MAX_MESSAGE_BYTES = 64 << 20
_MIN_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2000
_IDLE_MS = 240_000
"""A connection without calls is closed before the server closes it, which C-core would print."""
_URL = re.compile(r"https?:")
_ADVICE = {
    # OpenSSL's error for the first bytes of a server without TLS
    "WRONG_VERSION_NUMBER": "the server does not speak TLS: connect without it",
    # gRPC's for a connection that is closed before the server speaks, as one with TLS does
    "all addresses; last error: UNAVAILABLE": "if the server has TLS, give --tls or --tls-ca FILE",
    # gRPC's for a server that speaks HTTP/1.1 alone
    "http1.x server": "OpenAI's port is not this client's: give that of --port, 50051 by default",
    # the kernel's for a port on which no process listens
    "Connection refused": "no server is there: start one with `tpengine serve`, or give its place",
}
"""What to do, by a part of an error's text."""


@dataclass(frozen=True)
class ClientTLS:
    """TLS options of a client; each file is in PEM.

    Attributes:
        ca_file: the authorities to trust; None: those of the system.
        cert_file, key_file: the client's own certificate and key, for a server that needs them.
        server_name: name in the server's certificate, if it is not the target's host.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


def open_channel(target: str, tls: ClientTLS | None, keep_alive_s: float) -> grpc.aio.Channel:
    """A channel that connects at its first call.

    Raises:
        ConfigError: a file cannot be read, or an argument is invalid.
    """
    _check_target(target)
    options = _channel_options(keep_alive_s)
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, _credentials(tls), options)


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata with a bearer token; empty without one.

    Raises:
        ConfigError: it cannot be sent as metadata; the message does not quote it.
    """
    if token is None:
        return ()
    if not isinstance(token, str):
        raise ConfigError(f"a token must be a string, got one of type {type(token).__name__}")
    # For any other token grpc ends the call with an error that does not mention tokens.
    if not token or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            "a token must be one or more printable ASCII characters without spaces or line ends; "
            f"the one given, of {len(token)} characters, is not"
        )
    return (("authorization", f"Bearer {token}"),)


def check_timeout(name: str, seconds: float) -> float:
    """Returns a deadline in seconds, checked; `math.inf`: no deadline.

    Raises:
        ConfigError: it is not a number above 0.
    """
    if not isinstance(seconds, Real) or not seconds > 0:
        raise ConfigError(
            f"{name} must be a number of seconds above 0, or math.inf for no deadline; got "
            f"{seconds!r}"
        )
    return seconds


def _channel_options(keep_alive_s: float) -> list[tuple[str, Any]]:
    """Options that notice a frozen server: half of the time until a ping, half for its answer.

    Without `ping_timeout_ms` grpc waits a minute for the answer, whatever the keep-alive is, and
    without `min_reconnect_backoff_ms` twenty seconds for the first bytes of a frozen server.
    """
    if not isinstance(keep_alive_s, Real) or not 1.0 <= keep_alive_s <= 3600:
        raise ConfigError(f"keep_alive_s must be in [1, 3600], got {keep_alive_s!r}")
    half_ms = round(500 * keep_alive_s)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.client_idle_timeout_ms", _IDLE_MS),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", 2 * half_ms),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
    ]


def _check_target(target: str) -> None:
    # isprintable() is False for a lone surrogate.
    if isinstance(target, str) and target.isprintable() and not _URL.match(target):
        host, _, port = target.rpartition(":")
        # int() accepts digits of all scripts; grpc fails on them, and late.
        if host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536:
            return
    raise ConfigError(f"target must be of the form HOST:PORT, without a scheme, got {target!r}")


def _credentials(tls: ClientTLS) -> grpc.ChannelCredentials:
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError(
            "a client's certificate and its key belong together; one of them is missing"
        )
    return grpc.ssl_channel_credentials(*map(_read, (tls.ca_file, tls.key_file, tls.cert_file)))


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ConfigError(f"{path!r} cannot be read: {error}") from error


def to_error(error: grpc.aio.AioRpcError, target: str) -> TPEngineError:
    """The exception for the status of a call."""
    code, words = error.code(), f"{target}: {error.details()}"
    refused = read_error(code.name, words, error.trailing_metadata())
    if refused is not None:
        return refused
    if code is grpc.StatusCode.UNAVAILABLE:
        words += "".join(f"; {advice}" for sign, advice in _ADVICE.items() if sign in words)
        return ServerUnavailableError(words, code.name)
    return ServerError(words, code.name)


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server itself has refused or ended a call, so that the connection works."""
    return error.code() is not grpc.StatusCode.UNAVAILABLE or has_details(error.trailing_metadata())
