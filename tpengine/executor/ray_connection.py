"""This process's connection to Ray: found, or started and ended by us, but never both."""

from __future__ import annotations

import ray

from tpengine import envs
from tpengine.errors import ConfigError, EngineError
from tpengine.logger import init_logger

logger = init_logger(__name__)

RAY_IS_GONE = "Ray was shut down under the engine; make a new one"

# Ray knows one connection per process, so what counts its users is the process's, too.
_users_of_started_ray: set[int] = set()


class RayConnection:
    """Keeps Ray connected for one engine.

    A Ray that was there before, whoever started it, is used and left running. One that an engine
    started ends with the last engine that uses it.

    Raises:
        ConfigError: the address is of a kind that cannot work.
        EngineError: no Ray answers at the address.
    """

    def __init__(self, address: str | None) -> None:
        address = address or (None if ray.is_initialized() else envs.ray_address())
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                f"ray_address = {address!r}: Ray Client has no part in the cluster, so the ranks "
                "could not reach the driver; run the driver on a node of the cluster (`ray submit` "
                "does) and leave ray_address out"
            )
        if ray.is_initialized():
            if _users_of_started_ray:
                _users_of_started_ray.add(id(self))
        elif address == "local" or not self._connect(address):
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
    def _connect(address: str | None) -> bool:
        """Whether a Ray that runs already was found; only a named one must be there."""
        try:
            ray.init(address=address or "auto", log_to_driver=True, logging_level="warning")
        except ConnectionError as error:
            if address is None:
                return False
            raise EngineError(f"no Ray answers at ray_address = {address!r}: {error}") from error
        return True

    @staticmethod
    def _start() -> None:
        envs.prepare_local_ray()
        logger.info("no Ray runs here: starting one for this engine")
        ray.init(address="local", include_dashboard=False, logging_level="warning")

    def close(self) -> None:
        """Lets go; a second call does nothing."""
        if id(self) in _users_of_started_ray:
            _users_of_started_ray.discard(id(self))
            if not _users_of_started_ray and ray.is_initialized():
                ray.shutdown()
