"""Health by gRPC's own protocol: readiness means that the engine gets on.

The library's servicer is not used: it holds a lock while it writes to a watcher, and keeps an entry
for every name that anybody asks for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tpengine.errors import ModelNotFoundError, QueueFullError

LIVENESS = "liveness"
READINESS = "readiness"
SERVICE = "tpengine.v1.GenerationService"
MAX_WATCHERS = 256
MAX_WATCHERS_OF_HOST = 64
_LOOK_AGAIN_S = 10.0

_Status = health_pb2.HealthCheckResponse
_NAMES_OF_READINESS = ("", READINESS, SERVICE)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Liveness (`liveness`) and readiness (`readiness`, the service's name, or none at all)."""

    def __init__(self) -> None:
        self._status = dict.fromkeys(_NAMES_OF_READINESS, _Status.NOT_SERVING)
        self._status[LIVENESS] = _Status.SERVING
        self._changed = asyncio.Event()
        self._watchers: Counter[str] = Counter()
        self._closing = asyncio.Event()

    def set(self, *, alive: bool, ready: bool) -> None:
        """Notes how the engine is; watchers hear of a change."""
        status = dict.fromkeys(
            _NAMES_OF_READINESS, _Status.SERVING if ready else _Status.NOT_SERVING
        )
        status[LIVENESS] = _Status.SERVING if alive else _Status.NOT_SERVING
        if status != self._status:
            self._status = status
            self._wake()

    def close(self) -> None:
        """Ends all watches, once they have told the latest; the server would wait for them."""
        self._closing.set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers for one name; NOT_FOUND for one that is unknown."""
        if request.service not in self._status:
            raise ModelNotFoundError(
                f"health knows the names {sorted(self._status)}, not {request.service!r}"
            )
        return _Status(status=self._status[request.service])

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answers for all names."""
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=status) for name, status in self._status.items()}
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answers at once and with every change; SERVICE_UNKNOWN for a name that is unknown."""
        peer = _host(context.peer())
        if self._watchers.total() >= MAX_WATCHERS or self._watchers[peer] >= MAX_WATCHERS_OF_HOST:
            raise QueueFullError(
                f"{self._watchers.total()} calls watch this server's health already, of them "
                f"{self._watchers[peer]} from your machine; use Check",
                retry_after_s=_LOOK_AGAIN_S,
            )
        self._watchers[peer] += 1
        told = None
        try:
            while True:
                changed = self._changed
                status = self._status.get(request.service, _Status.SERVICE_UNKNOWN)
                if status != told:
                    yield _Status(status=status)
                    told = status
                    continue  # it may have changed while the watcher was slow to take it
                if self._closing.is_set():
                    return
                try:
                    await asyncio.wait_for(changed.wait(), _LOOK_AGAIN_S)
                except TimeoutError:
                    continue
        finally:
            self._watchers[peer] -= 1
            self._watchers += Counter()  # without hosts that watch no more


def _host(peer: str) -> str:
    """Of gRPC's words for who calls, without the port: each connection has another."""
    return peer.rpartition(":")[0] or peer
