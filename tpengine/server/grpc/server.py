"""The gRPC server: one port with both services, health and reflection, behind one guard.

`batch_wake_ups` changes how grpc wakes the event loop. Without it a server takes
1.08 times the CPU time outside the engine per token; without it and `_TokenSender` of
server/stream_sender.py 1.22 times (256 streams of the embedded model, two CPU cores that other work
shared; medians of 5 and 9 pairs, measured on 2026-11-22).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server

from tpengine.errors import ConfigError, ModelNotFoundError, QueueFullError
from tpengine.logger import init_logger
from tpengine.proto import LIVENESS, READINESS, SERVICE, tpengine_pb2_grpc
from tpengine.server.auth import Authenticator, CertificateReloader, TlsContents
from tpengine.server.grpc.guard import Guard, address_of
from tpengine.server.grpc.service import GenerationServicer
from tpengine.server.grpc.vllm import VLLM_SERVICE, VllmServicer
from tpengine.server.limits import Limits, address_key, change_count
from tpengine.server.state import ServerState

logger = init_logger(__name__)

_RETRY_AFTER_S = 10.0
_IDLE_S = 300.0
"""Longest time without a call on a connection. A client with gRPC's C-core that is idle for longer
prints a line about it; ours closes its connection before."""
_UNTAKEN_S = 600
_PING_MS = 15_000
_HOSTS_POLL_S = 1.0
MAX_WATCHERS = 1024
"""Calls of Watch that may be open; health needs no token."""
_HEALTH = "grpc.health.v1.Health"
_MAX_WAKE_UPS = 4096
_MAX_OPTION = (1 << 31) - 1
"""Largest value of an option; gRPC fails on a larger one."""

_Status = health_pb2.HealthCheckResponse
_NAMES_OF_READINESS = ("", READINESS, SERVICE, VLLM_SERVICE)


class GrpcServer:
    """One gRPC server. Created in the event loop that serves it; listens nowhere at first.

    Args:
        state: of the server; has the engine once it is loaded, and the limits.
        authenticator: identifies clients.

    Attributes:
        health: answers for liveness and readiness.
    """

    def __init__(self, state: ServerState, authenticator: Authenticator) -> None:
        self.health = HealthServicer(state.limits.max_host_health_calls)
        self._max_host_connections = state.limits.max_host_connections
        self._bounding: asyncio.Task[None] | None = None
        guard = Guard(authenticator, state)
        self._server = grpc.aio.server(interceptors=[guard], options=_options(state.limits))
        servicer = GenerationServicer(state)
        tpengine_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        add_VllmEngineServicer_to_server(VllmServicer(state), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        names = (SERVICE, VLLM_SERVICE, _HEALTH, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str, tls: CertificateReloader | None) -> int:
        """Binds the port, answers from now on, and returns the port.

        Raises:
            ConfigError: the port is taken, or the address is not one of this machine.
        """
        credentials = None if tls is None else _credentials(tls)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken, or the address is not one of this "
                "machine; choose another with --host and --port"
            ) from error
        await self._server.start()
        self._bounding = asyncio.create_task(self._bound_hosts(int(port)))
        return int(port)

    async def _bound_hosts(self, port: int) -> None:
        known: set[int] = set()
        while True:
            await asyncio.sleep(_HOSTS_POLL_S)
            with contextlib.suppress(OSError):  # no descriptor is left to list them with
                known = await asyncio.to_thread(end_excess, port, self._max_host_connections, known)

    async def close(self, grace_s: float) -> None:
        """Ends all watches of health, then within this time all other calls, and the server."""
        self.health.close()
        if self._bounding is not None:
            self._bounding.cancel()
        await self._server.stop(grace_s)


def batch_wake_ups(loop: asyncio.AbstractEventLoop) -> None:
    """Makes a loop handle all events of grpc in one turn. Called before grpc knows the loop,
    and only in a process with one event loop: a closed loop's events would stop the others'.

    grpc.aio writes one byte into a socket for each event, such as a message that is sent. Its
    reader takes one byte per turn of the loop, but all events. After a step of 200 streams this
    leaves 200 turns without work, each with two system calls, and in each the engine's thread may
    take the interpreter's lock. The gain is at the head of this file.
    """
    add_reader = loop.add_reader

    def add_batching_reader(file: Any, callback: Callable[..., Any], *args: Any) -> None:
        owner = callback.func if isinstance(callback, functools.partial) else callback
        is_grpc = type(getattr(owner, "__self__", None)).__module__.startswith("grpc.")
        if is_grpc and isinstance(file, socket.socket):
            add_reader(file, read_batch, file, callback, *args)
        else:
            add_reader(file, callback, *args)

    loop.add_reader = add_batching_reader  # type: ignore[method-assign,assignment]


def read_batch(wake_ups: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    num_bytes = len(wake_ups.recv(_MAX_WAKE_UPS, socket.MSG_PEEK))
    # One byte stays for the callback, which would wait for it. grpc writes a byte after it has
    # queued the event, so the callback finds the events of all bytes that are taken here.
    if num_bytes > 1:
        wake_ups.recv(num_bytes - 1)
    callback(*args)


def _options(limits: Limits) -> list[tuple[str, int]]:
    def in_ms(seconds: float) -> int:
        return min(int(1000 * seconds), _MAX_OPTION)

    max_streams = limits.max_connection_calls + limits.queue.max_requests
    max_pending = min(2 * limits.places, _MAX_OPTION)
    return [
        # Two servers on one port would share it silently, each with half of the clients.
        ("grpc.so_reuseport", 0),
        # Per connection. A client library queues calls over it; others are cut off.
        ("grpc.max_concurrent_streams", min(max_streams, _MAX_OPTION)),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # Calls that this process has not taken yet, while its loop is busy. gRPC ends those beyond
        # with CANCELLED, which says neither why nor when to try again; by default it begins at 1000
        # calls and after 30 s. Here is room for all places, and for as many calls without one.
        ("grpc.server.max_pending_requests", max_pending),
        ("grpc.server.max_pending_requests_hard_limit", max_pending),
        ("grpc.server_max_unrequested_time_in_server", _UNTAKEN_S),
        # Above the second size every call is refused; between the two only some would be.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # Silent clients would else hold descriptors, which are few. C-core counts connections in
        # total alone; `end_excess` counts those of an address. Streams last as long as their
        # clients like: no age limit.
        ("grpc.max_allowed_incoming_connections", min(limits.max_connections, _MAX_OPTION)),
        ("grpc.server_handshake_timeout_ms", in_ms(limits.head_s)),
        ("grpc.max_connection_idle_ms", in_ms(_IDLE_S)),
        # A client whose machine has died sends no end of its connection.
        # It also breaks the silence of a stream that waits, before a proxy takes it for dead.
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping often to notice a frozen server, but not flood it.
        ("grpc.http2.min_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 10),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def end_excess(port: int, most: int, known: Set[int]) -> set[int]:
    """Ends connections to a port of this process of each address that has more than so many.

    gRPC counts no addresses. But its connections are descriptors of this process, and gRPC closes
    one that is shut down here.

    Args:
        known: descriptors of connections that the last call has let be; others go first.

    Returns:
        The same of this call.
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    of_host: Counter[str] = Counter()
    kept: set[int] = set()
    if len(numbers) <= most:
        return kept
    for number in sorted(numbers, key=lambda number: (number not in known, number)):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.fromfd(number, socket.AF_INET6, 0) as connection:
                if connection.getsockname()[1:2] != (port,):
                    continue
                host = address_key(connection.getpeername()[0])
                of_host[host] += 1
                if of_host[host] <= most:
                    kept.add(number)
                else:
                    connection.shutdown(socket.SHUT_RDWR)
    for host, count in of_host.items():
        if count > most:
            logger.warning("ended %d of %d gRPC connections of %s", count - most, count, host)
    return kept


def _credentials(certificates: CertificateReloader) -> grpc.ServerCredentials:
    """Credentials that follow the files."""
    sent = certificates.contents

    def configuration(contents: TlsContents) -> Any:
        certificate, key, client_authority = contents
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_authority)

    def fetch() -> Any:  # grpc calls it at every handshake, on a thread of its own
        nonlocal sent
        if certificates.contents is sent:
            return None
        sent = certificates.contents
        return configuration(sent)

    return grpc.dynamic_ssl_server_credentials(configuration(sent), fetch, sent[2] is not None)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Liveness (`liveness`) and readiness (`readiness`, a service's name, or no name).

    The servicer of grpc_health is not used: it holds a lock while it writes to a watcher, and keeps
    an entry for every name that a client asks for.

    Args:
        max_host_watchers: calls of Watch that one address may have open.
    """

    def __init__(self, max_host_watchers: int) -> None:
        self._max_host_watchers = max_host_watchers
        self._status: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._watchers: Counter[str] = Counter()
        self._closing = asyncio.Event()
        self.set(alive=True, ready=False)

    def set(self, *, alive: bool, ready: bool) -> None:
        """Sets the status of all names; watchers get a change."""
        words = (_Status.NOT_SERVING, _Status.SERVING)
        status = dict.fromkeys(_NAMES_OF_READINESS, words[ready]) | {LIVENESS: words[alive]}
        if status != self._status:
            self._status = status
            self._wake()

    def close(self) -> None:
        """Ends all watches after they have sent the latest status; the server waits for them."""
        self._closing.set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers for one name; NOT_FOUND for an unknown one."""
        if request.service not in self._status:
            text = f"health knows the names {sorted(self._status)}, not {request.service!r}"
            raise ModelNotFoundError(text)
        return _Status(status=self._status[request.service])

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers for all names."""
        statuses = {name: _Status(status=status) for name, status in self._status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers at once and at every change; SERVICE_UNKNOWN for an unknown name."""
        host = address_of(context)
        total, of_host = self._watchers.total(), self._watchers[host]
        if total >= MAX_WATCHERS or of_host >= self._max_host_watchers:
            raise QueueFullError(
                f"{total} calls watch this server's health already, of {MAX_WATCHERS} that may; "
                f"{of_host} of them from your address, of {self._max_host_watchers}; use Check",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._watchers[host] += 1
        sent = None
        try:
            while True:
                changed = self._changed
                status = self._status.get(request.service, _Status.SERVICE_UNKNOWN)
                if status != sent:
                    yield _Status(status=status)
                    sent = status
                    continue  # it may have changed while the message was sent
                if self._closing.is_set():
                    return
                await changed.wait()
        finally:
            change_count(self._watchers, host, -1)
