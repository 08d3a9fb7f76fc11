"""What a client's connection is made of: where to, how encrypted, as whom, how soon given up."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import grpc

from tpengine.errors import ConfigError

_MAX_MESSAGE_BYTES = 64 << 20
_MIN_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2000


@dataclass(frozen=True)
class ClientTLS:
    """How to meet a server that wants TLS.

    Attributes:
        ca_file: PEM of the authorities to trust; None: those of the system.
        cert_file, key_file: PEM of the client's own certificate and key, for servers that want one.
        server_name: name that the server's certificate is for, if that is not the target's host.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


def open_channel(target: str, tls: ClientTLS | None, keep_alive_s: float) -> grpc.aio.Channel:
    """A channel that connects with its first call.

    Raises:
        ConfigError: a file cannot be read, or an argument is none of its kind.
    """
    _check_target(target)
    options = _channel_options(keep_alive_s)
    if tls is None:
        return grpc.aio.insecure_channel(target, options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, _credentials(tls), options)


def authorization(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that show a bearer token; none without one.

    Raises:
        ConfigError: it cannot stand in metadata; the message does not quote it.
    """
    if token is None:
        return ()
    if not isinstance(token, str):
        raise ConfigError(f"a token must be a string, got one of type {type(token).__name__}")
    # grpc ends a call with anything else in it by an error that says nothing of tokens.
    if not token or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            "a token must be one or more printable ASCII characters without spaces or line ends; "
            f"the one given, of {len(token)} characters, is not"
        )
    return (("authorization", f"Bearer {token}"),)


def check_timeout(name: str, seconds: float) -> float:
    """Seconds that a client gives its calls; `math.inf`: any time.

    Raises:
        ConfigError: it is no number, or not above 0.
    """
    if not isinstance(seconds, Real) or not seconds > 0:
        raise ConfigError(
            f"{name} must be a number of seconds above 0, or math.inf for no deadline; got "
            f"{seconds!r}"
        )
    return seconds


def _channel_options(keep_alive_s: float) -> list[tuple[str, Any]]:
    """Pings while calls are open; half of the time until one is sent, half for its answer.

    Without `ping_timeout_ms` grpc waits a minute for the answer whatever the keep-alive says, and
    without `min_reconnect_backoff_ms` it waits twenty seconds for a frozen server's first word.
    """
    if not isinstance(keep_alive_s, Real) or not 1.0 <= keep_alive_s <= 3600:
        raise ConfigError(f"keep_alive_s must be in [1, 3600], got {keep_alive_s!r}")
    half_ms = round(500 * keep_alive_s)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", _MIN_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", 2 * half_ms),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
    ]


def _check_target(target: str) -> None:
    if isinstance(target, str) and target.isprintable():  # a lone surrogate is not, either
        host, _, port = target.rpartition(":")
        # int() takes the digits of all scripts; grpc does not, and takes its time to say so.
        if host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536:
            return
    raise ConfigError(f"target must be of the form HOST:PORT, got {target!r}")


def _credentials(tls: ClientTLS) -> grpc.ChannelCredentials:
    if (tls.cert_file is None) != (tls.key_file is None):
        raise ConfigError("a client's certificate and its key go together; one of them is missing")
    return grpc.ssl_channel_credentials(
        _read(tls.ca_file), _read(tls.key_file), _read(tls.cert_file)
    )


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        raise ConfigError(f"{path!r} cannot be read: {error}") from error
