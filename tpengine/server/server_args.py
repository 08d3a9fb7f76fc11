"""`ServerArgs`: the options of `tpengine serve` in addition to the engine's, and their checks."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tpengine import envs
from tpengine.async_engine.admission import QueueLimits
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError
from tpengine.inputs import LoRARequest
from tpengine.options import Options, each, option
from tpengine.server.auth import Authenticator, read_tokens
from tpengine.server.limits import Limits

MAX_PORT = 65535
MAX_MESSAGE_MIB = 1024
MAX_WRITE_S = 86_400
"""The system counts a connection's timeout in milliseconds, in 32 bits."""
MAX_RESUME_S = 86_400
MAX_QUEUED = (1 << 63) - 1
"""The largest value of the protocol's int64 fields."""
_QUEUE = QueueLimits()
_PLACES_OF_OTHERS = 1024
"""Places for calls that by default no single client can take."""
_HTTP_PACKAGES = ("starlette", "uvicorn", "httptools", "orjson")


@dataclass
class ServerArgs(Options):
    """Arguments of a server; each is also a command-line option (`drain_timeout` is
    `--drain-timeout`), with the same default and the text below the field in `--help`."""

    group: ClassVar[str] = "server"

    host: str = option("127.0.0.1")
    """Address to listen on, 0.0.0.0: all; any but loopback needs TLS, a token or --insecure, and
    with --http-port a token, --tls-client-ca or --insecure."""
    port: int = option(50051, at_least=0, at_most=MAX_PORT)
    """Port to listen on; 0 takes a free one, which is printed."""
    http_port: int | None = option(None, at_least=0, at_most=MAX_PORT)
    """Port for OpenAI's HTTP interface; 0 takes a free one; default: none."""
    cors_origin: str | None = option(None)
    """Origins whose web pages may call over HTTP, separated by commas, *: all; default: none."""
    allowed_hosts: str | None = option(None)
    """Names by which clients may call over HTTP, besides addresses, localhost and --host, separated
    by commas, *: all. Default: none where the server listens on this machine alone, without key and
    TLS, since a web page may have a name that leads here; else all."""
    api_key: str | None = option(None)
    """Bearer tokens of clients, separated by commas, over HTTP and gRPC; other users of this
    machine can see them in the list of processes: --token-file is safer."""
    token_file: str | None = option(None)
    """Bearer tokens of clients, one per line, at least 16 characters each, as from `openssl rand
    -hex 24`; a space and the token's weight for --fairness may follow; a line that begins with # is
    a comment; without it and without TPENGINE_TOKENS (separated by commas), clients need no
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
    share_prefixes: bool = option(False)
    """Let clients of different tokens or certificates find each other's prompts in the prefix
    cache. This is faster where they send the same beginnings, and the number of cached tokens and
    the time to the first token then tell each of them what others have sent."""
    insecure: bool = option(False)
    """Listen beyond this machine without TLS and without tokens."""
    max_queued_requests: int = option(_QUEUE.max_requests, at_most=MAX_QUEUED)
    """Most requests that may wait to start; more are refused."""
    max_queued_tokens: int = option(_QUEUE.max_tokens, at_most=MAX_QUEUED)
    """Most prompt tokens that may wait to start; more are refused."""
    max_message_mib: float | None = option(None, more_than=0, at_most=MAX_MESSAGE_MIB)
    """Largest request in MiB, after decompression; default: 0.5 and 64 bytes for each token of
    max_model_len, at most 4; 27 more for a model that reads pictures, 25 for one of sound."""
    isolate: bool = option(False)
    """Run the only rank in a process of its own, so that a crash in it loses no request; each step
    takes longer. No effect with several ranks, or with --executor processes or ray; refused with
    --executor local."""
    max_client_requests: int | None = option(None, at_least=1, at_most=MAX_QUEUED)
    """Most open calls of one client (its token or certificate, else its address); default: all
    places but 1024, so that one gateway can fill the engine and the queue, and others get in."""
    write_timeout: float = option(60.0, more_than=0, at_most=MAX_WRITE_S, unit=" seconds")
    """Seconds after which a stream ends whose client takes nothing of it."""
    keep_alive: float = option(75.0, more_than=0, at_most=MAX_WRITE_S, unit=" seconds")
    """Seconds without a call after which a connection over HTTP is closed. Give more than the proxy
    in front has for its connections to this server (often 60), or it may send a call into a closing
    one."""
    sse_ping: float = option(15.0, more_than=0, at_most=MAX_WRITE_S, unit=" seconds")
    """Seconds without a token after which a stream over HTTP gets a comment line, which clients
    skip, so that no proxy ends it as dead; if it comes before the first token, a later error is an
    event of the stream and has no status."""
    resume_window: float = option(0.0, at_least=0, at_most=MAX_RESUME_S, unit=" seconds")
    """Longest time in seconds for which a stream goes on and is kept without its client, so that
    the client can resume it. Only for clients that ask for it; 0: for none."""
    drain_timeout: float = option(30.0, at_least=0, unit=" seconds")
    """Seconds that running requests get to finish after SIGTERM, SIGINT, SIGHUP or Drain."""
    startup_timeout: float = option(1800.0, at_least=0, unit=" seconds")
    """Seconds until the server must be ready; later it ends with exit code 1."""
    metrics_port: int | None = option(None, at_least=0, at_most=MAX_PORT)
    """Port for Prometheus on 127.0.0.1, at /metrics; 0 takes a free one; default: none."""
    lora_modules: str | Sequence[str] | None = option(None, takes_words=True, metavar="NAME=PATH")
    """LoRA adapters that are served under a name of their own, as `model` in a request; needs
    --enable-lora; default: none."""
    lora_folder: str | None = option(None)
    """Folder of adapters that clients with the admin token may load and unload over HTTP; default:
    none."""

    def check(self) -> None:
        """Checks each argument by itself, and those that belong together or exclude each other.

        Raises:
            ConfigError: a value is outside its limits, one of a pair is missing, or two servers
                have one port.
        """
        super().check()
        taken: dict[int, str] = {}
        for name in ("port", "http_port", "metrics_port"):
            number = getattr(self, name)
            if number and taken.setdefault(number, name) != name:  # None: no port; 0: any free one
                both = f"{name} and {taken[number]}"
                raise ConfigError(f"{both} are both {number}; give each its own number")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key")
        places = self.limits().places
        if (self.max_client_requests or 0) > places:
            raise ConfigError(
                f"max_client_requests = {self.max_client_requests} is more than the {places} calls "
                "that may be open, so it bounds no client; give fewer, or raise "
                "--max-queued-requests"
            )
        self.adapters()
        if self.allowed_hosts is not None and self.http_port is None and self.metrics_port is None:
            raise ConfigError("allowed_hosts needs http_port or metrics_port; give --http-port")
        for name in ("cors_origin", "lora_folder"):
            if getattr(self, name) is not None and self.http_port is None:
                raise ConfigError(f"{name} needs http_port; give a port with --http-port")
        if self.lora_folder is not None and not Path(self.lora_folder).is_dir():
            raise ConfigError(f"lora_folder = {self.lora_folder!r} is no folder; make it first")
        missing = [name for name in _HTTP_PACKAGES if importlib.util.find_spec(name) is None]
        if self.http_port is not None and missing:
            needed = f"needs packages that are missing: {', '.join(missing)}"
            raise ConfigError(f"http_port {needed}; install tpengine with its extra http")

    def check_exposure(self, authenticator: Authenticator) -> None:
        """Refuses an address that other machines reach, if clients need neither TLS nor a token;
        over HTTP TLS alone does not do, because every browser and HTTP client speaks it.

        Raises:
            ConfigError: any client in the network could use the server.
        """
        if is_loopback(self.host) or authenticator.wants_token or self.insecure:
            return
        tls, needed = self.tls_cert, "--tls-cert and --tls-key"
        if self.http_port is not None:
            tls, needed = self.tls_client_ca, "--tls-client-ca"
        if tls is None:
            raise ConfigError(
                f"host = {self.host} can be reached from other machines, and any client there "
                f"could use the model; give {needed}, or --token-file or --api-key, or say "
                "--insecure, or listen on 127.0.0.1"
            )

    def check_adapters(self, engine_args: EngineArgs) -> None:
        """Checks the options of adapters together with those of the engine.

        Raises:
            ConfigError: the engine serves no adapters, or one has the model's name.
        """
        for name in ("lora_modules", "lora_folder"):
            if getattr(self, name) is not None and not engine_args.enable_lora:
                raise ConfigError(f"{name} needs enable_lora; start with --enable-lora as well")
        for adapter in self.adapters():
            if adapter.lora_name in engine_args.served_names:
                raise ConfigError(
                    f"lora_modules has {adapter.lora_name!r}, which is the model's own name; give "
                    "the adapter another one, or the model with --served-model-name"
                )

    def salts_prefixes(self, authenticator: Authenticator) -> bool:
        """Whether clients, which have names, find only their own prompts in the prefix cache."""
        has_names = authenticator.wants_token or self.tls_client_ca is not None
        return has_names and not self.share_prefixes

    def check_ports(self) -> None:
        """Checks that the ports are free, before anything slow is done.

        Raises:
            ConfigError: see `check_port`.
        """
        check_port(self.host, self.port)
        if self.http_port is not None:
            check_port(self.host, self.http_port, "--http-port")
        if self.metrics_port is not None:
            check_port("127.0.0.1", self.metrics_port, "--metrics-port")

    def adapters(self) -> list[LoRARequest]:
        """The adapters of `lora_modules`.

        Raises:
            ConfigError: one is not of the form NAME=PATH, or two have one name.
        """
        parts = [module.partition("=") for module in each(self.lora_modules)]
        if len({name for name, _, _ in parts}) < len(parts) or not all(map(all, parts)):
            must = "must be NAME=PATH, each name once"
            raise ConfigError(f"lora_modules {must}; got {self.lora_modules!r}")
        return [LoRARequest(name, at, path) for at, (name, _, path) in enumerate(parts, start=1)]

    def limits(self) -> Limits:
        """Bounds of a request and of the queue.

        Raises:
            ConfigError: a limit of the queue is below 1.
        """
        limits = Limits(
            write_s=self.write_timeout,
            idle_s=self.keep_alive,
            sse_ping_s=self.sse_ping,
            resume_window_s=self.resume_window,
            queue=QueueLimits(self.max_queued_requests, self.max_queued_tokens),
        )
        if self.max_message_mib is not None:
            limits = replace(limits, max_message_bytes=int(self.max_message_mib * (1 << 20)))
        most = self.max_client_requests or limits.places - _PLACES_OF_OTHERS
        return replace(limits, max_client_requests=most)

    def authenticator(self) -> Authenticator:
        """Reads the tokens.

        Raises:
            ConfigError: a token file cannot be used.
        """
        keys = read_tokens(None, self.api_key, "--api-key")
        source = "--token-file (or TPENGINE_TOKENS)"
        keys |= read_tokens(self.token_file, envs.tokens(), source)  # whose weights hold
        source = "--admin-token-file (or TPENGINE_ADMIN_TOKEN)"
        admin_keys = read_tokens(self.admin_token_file, envs.admin_token(), source)
        return Authenticator(keys, admin_keys)

    def cors_origins(self) -> list[str]:
        """The origins of `cors_origin`."""
        return _parts(self.cors_origin)

    def hosts(self, authenticator: Authenticator) -> list[str]:
        """Names by which clients may call over HTTP, besides those of `is_own_host`; "*": all."""
        is_open = self.tls_cert is None and not authenticator.wants_token and is_loopback(self.host)
        return self.names() if is_open or self.allowed_hosts is not None else ["*"]

    def names(self) -> list[str]:
        """Names of this server."""
        return [self.host.lower(), *(name.lower() for name in _parts(self.allowed_hosts))]

    def address(self) -> str:
        """HOST:PORT."""
        return join_address(self.host, self.port)


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def join_address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, only localhost counts as such."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check_port(host: str, port: int, option: str = "--port") -> list[tuple[int, Any]]:
    """Binds a port and releases it. gRPC's own error does not contain the system's reason.
    Returns family and address of each that can be bound.

    Args:
        host: an address of this machine, or a name.
        port: 0: any.
        option: the option to change, for the message.

    Raises:
        ConfigError: the port is taken or not permitted, or the address is not one of this machine.
    """
    try:
        all_found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        text = f"host = {host!r} is neither an address nor a known name: {error}"
        raise ConfigError(text) from error
    usable: list[tuple[int, Any]] = []
    for family, address in dict.fromkeys((family, address) for family, *_, address in all_found):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                # As gRPC does: closed connections of an earlier server do not block the port.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
        except OSError as error:
            # A name may have addresses that this machine lacks (::1 without IPv6).
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            why = f"{error.strerror}; another process has the port, or this user may not have it"
            text = f"cannot listen on {host}, port {port}: {why}; choose another with {option}"
            raise ConfigError(text) from error
        usable.append((family, address))
    if not usable:
        text = f"{host}: it is not one of this machine; choose another with --host"
        raise ConfigError(f"cannot listen on {text}")
    return usable
