"""This process's connection to Ray: found, or started and ended by us, but never both."""

from __future__ import annotations

import socket

import ray

from tpengine import envs
from tpengine.errors import ConfigError, EngineError
from tpengine.logger import init_logger

logger = init_logger(__name__)

RAY_IS_GONE = "Ray was shut down under the engine; make a new one"

_PRIVATE = {"tpengine-private": "yes"}
"""Label of the node of a Ray that an engine started for itself: it ends with that engine, and has
only the room that that engine wants."""
_KNOCK_S = 2.0
"""What an address gets to accept a connection; Ray itself tries for most of a minute."""

# Ray knows one connection per process, so what counts its users is the process's, too.
_users_of_started_ray: set[int] = set()


class RayConnection:
    """Keeps Ray connected for one engine.

    A Ray that was there before is used and left running. One that an engine started ends with the
    last engine of its process; engines of other processes leave it alone unless they name it.

    Raises:
        ConfigError: the address is of a kind that cannot work.
        EngineError: no Ray answers at the address.
    """

    def __init__(self, address: str | None) -> None:
        origin = "ray_address"
        if address is None and not ray.is_initialized():
            address, origin = envs.ray_address(), "RAY_ADDRESS"
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                f"ray_address = {address!r}: Ray Client has no part in the cluster, so the ranks "
                "could not reach the driver; run the driver on a node of the cluster (`ray submit` "
                "does) and leave ray_address out"
            )
        if ray.is_initialized():
            if _users_of_started_ray:
                _users_of_started_ray.add(id(self))
        elif address == "local" or not self._connect(address, origin):
            self._start()
            _users_of_started_ray.add(id(self))
        self._identity = self._identify()

    @staticmethod
    def _identify() -> tuple[str, str]:
        """Another cluster has another node, another connection to the same one another job."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    @property
    def is_alive(self) -> bool:
        """Whether Ray is still what was connected: its calls join another cluster if it is not, or
        start one."""
        return ray.is_initialized() and self._identify() == self._identity

    @staticmethod
    def _connect(address: str | None, origin: str) -> bool:
        """Whether a Ray that runs already was found; only a named one must be there."""
        if address is not None:
            _knock(address, origin)
        try:
            ray.init(address=address or "auto", log_to_driver=True, logging_level="warning")
        except ConnectionError as error:
            if address is None:
                return False
            raise EngineError(f"no Ray answers at {origin} = {address!r}: {error}") from error
        found = ray.get_runtime_context().gcs_address
        if address is not None:
            logger.info("connected to Ray at %s (%s)", found, origin)
            return True
        if any(node["Labels"].items() >= _PRIVATE.items() for node in ray.nodes()):
            ray.shutdown()
            logger.info("the Ray at %s was started by another engine for itself", found)
            return False
        logger.info(
            "connected to Ray at %s (found running here; ray_address='local' starts one of its "
            "own)",
            found,
        )
        return True

    @staticmethod
    def _start() -> None:
        envs.prepare_local_ray()
        logger.info("starting a Ray for this engine; no other is named, or runs here for all")
        ray.init(address="local", include_dashboard=False, logging_level="warning", labels=_PRIVATE)

    def close(self) -> None:
        """Lets go; a second call does nothing."""
        if id(self) in _users_of_started_ray:
            _users_of_started_ray.discard(id(self))
            if not _users_of_started_ray and ray.is_initialized():
                ray.shutdown()


def _knock(address: str, origin: str) -> None:
    """Finds out in seconds that nobody is there.

    Raises:
        EngineError: nothing accepts a connection at HOST:PORT; other forms are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except OSError as error:
        raise EngineError(
            f"no Ray answers at {origin} = {address!r}: {error}; start one there (`ray start "
            "--head`), or leave the address out to have one started"
        ) from error
