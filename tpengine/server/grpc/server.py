"""The gRPC server: one port, three services, one guard."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tpengine.errors import ConfigError
from tpengine.server.auth import Authenticator
from tpengine.server.grpc.guard import Guard
from tpengine.server.grpc.health import SERVICE, HealthServicer
from tpengine.server.grpc.proto import tpengine_pb2_grpc
from tpengine.server.grpc.service import GenerationServicer
from tpengine.server.limits import Limits
from tpengine.server.tls import CertificateReloader, TlsFiles

_HEALTH = "grpc.health.v1.Health"


def make_server(
    servicer: GenerationServicer,
    health: HealthServicer,
    authenticator: Authenticator,
    limits: Limits,
) -> Any:
    """A server with all services; it listens nowhere yet."""
    server = grpc.aio.server(interceptors=[Guard(authenticator, limits)], options=_options(limits))
    tpengine_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, _HEALTH, reflection.SERVICE_NAME), server)
    return server


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        # Two servers on one port would share it silently, each with half of the clients.
        ("grpc.so_reuseport", 0),
        # Of one connection; a client keeps what is over it to itself, others are cut off.
        ("grpc.max_concurrent_streams", limits.max_connection_calls + limits.queue.max_requests),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # Of the second size calls are refused; between the two some would be.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        # A client whose machine has gone sends no end of its connection.
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may look often whether we are frozen, but not flood.
        ("grpc.http2.min_ping_interval_without_data_ms", 250),
        ("grpc.http2.max_ping_strikes", 10),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def listen(server: Any, address: str, tls: TlsFiles | None) -> int:
    """Binds the port, and returns it.

    Raises:
        ConfigError: the port is taken, the address is none of this machine, or the certificates
            cannot be used.
    """
    credentials = None if tls is None else CertificateReloader(tls).credentials()
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is taken, or the address is not one of this "
            "machine; choose another with --host and --port"
        ) from error
    return int(port)
