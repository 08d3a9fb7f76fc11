"""This process's connection to Ray: found, or started and ended by us, but never both."""

from __future__ import annotations

import socket
import threading
import time

import ray

from tpengine import envs
from tpengine.errors import ConfigError, EngineError
from tpengine.executor.launch.failed_ray import end_ray_children, ray_children
from tpengine.executor.processes import tail
from tpengine.host import kept_sigterm_handler
from tpengine.logger import init_logger

logger = init_logger(__name__)

RAY_IS_GONE = "Ray was shut down under the engine; make a new one"

_STARTED = "ray_current_cluster"
"""Where `ray start` notes the cluster that it made this machine a part of, and which everybody here
is meant to use. A Ray that a program has started for itself stands in no such file: it ends with
that program, and has only the room that that one wants."""
_KNOCK_S = 2.0
"""What an address gets to accept a connection; Ray itself tries for most of a minute."""

_STARTS = 2
"""Ray's control server is sometimes not up within Ray's half minute, where others want the cores;
the next one is."""
_FAILED_STARTS = (RuntimeError, OSError, ray.exceptions.RayError)
_CONTROL_LOGS = "session_latest/logs/gcs_server.*"

# Ray knows one connection per process, so what counts its users is the process's, too.
_users_of_started_ray: set[int] = set()
_connecting = threading.Lock()
_CONNECTING_S = 300.0
"""More than two starts of Ray take, both of which fail."""


class RayConnection:
    """Keeps Ray connected for one engine.

    A Ray that was there before is used and left running: the one that is named, or else the one
    that `ray start` started. One that an engine started ends with the last engine of its process;
    others leave it alone unless they name it, as engines do with those of other programs.

    Raises:
        ConfigError: the address is of a kind that cannot work.
        EngineError: no Ray answers at the address.
    """

    def __init__(self, address: str | None) -> None:
        if not _connecting.acquire(timeout=_CONNECTING_S):
            raise EngineError(
                f"another thread of this process has been connecting to Ray for {_CONNECTING_S:g} "
                "s; make the engines one after another"
            )
        try:
            self._join(address)
        finally:
            _connecting.release()

    def _join(self, address: str | None) -> None:
        """One thread at a time: Ray has one connection, and a failed start is cleared away."""
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
        else:
            with kept_sigterm_handler():
                self._open(address, origin)
        self._identity = self._identify()

    def _open(self, address: str | None, origin: str) -> None:
        if address is not None and address != "local":
            _knock(address, origin)
            self._connect(address, origin)
        elif address == "local":
            self._start(f"{origin} = 'local' asks for one")
        elif not self._find():
            self._start("no address is given, and none that `ray start` began runs here")

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

    @classmethod
    def _find(cls) -> bool:
        """Connects to the Ray that was started on this machine for all; whether there is one."""
        for folder in envs.ray_folders():
            try:
                address = (folder / _STARTED).read_text().strip()
                if _host_and_port(address) is None:  # anybody's file of that name
                    continue
                _knock(address, str(folder / _STARTED))
                cls._connect(address, "found running here; ray_address='local' starts another")
            except (OSError, UnicodeDecodeError, EngineError):  # none, or it outlived its Ray
                continue
            return True
        return False

    @staticmethod
    def _connect(address: str, origin: str) -> None:
        """Connects to a Ray that runs already."""
        try:
            ray.init(address=address, log_to_driver=True, logging_level="warning")
        except ConnectionError as error:
            raise EngineError(f"no Ray answers at {origin} = {address!r}: {error}") from error
        found = ray.get_runtime_context().gcs_address
        logger.info("connected to Ray at %s (%s)", found, origin)

    def _start(self, why: str) -> None:
        """Starts a Ray that ends with the last engine of this process."""
        envs.prepare_local_ray()
        logger.info("starting a Ray for this engine: %s", why)
        for left in reversed(range(_STARTS)):
            begun, others = time.time(), ray_children()
            try:
                ray.init(address="local", include_dashboard=False, logging_level="warning")
                _users_of_started_ray.add(id(self))
                return
            except Exception as error:
                if ray.is_initialized():  # by the program itself meanwhile: what came since is its
                    raise EngineError(f"Ray was started twice at a time: {error}") from error
                end_ray_children(but=others)
                # Ray raises a bare Exception where its raylet is late.
                if type(error) is not Exception and not isinstance(error, _FAILED_STARTS):
                    raise
                said = _last_words_of_ray(begun)
                if not left:
                    raise EngineError(
                        f"Ray did not start on this machine, {_STARTS} times: {error}; {said}"
                    ) from error
                logger.warning("Ray did not start: %s; %s; once more", error, said)

    def close(self) -> None:
        """Lets go; a second call does nothing."""
        if id(self) in _users_of_started_ray:
            _users_of_started_ray.discard(id(self))
            if not _users_of_started_ray and ray.is_initialized():
                ray.shutdown()


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Of HOST:PORT; None: it is something else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def _knock(address: str, origin: str) -> None:
    """Finds out in seconds that nobody is there.

    Raises:
        EngineError: nothing accepts a connection at HOST:PORT; other forms are left to Ray.
    """
    found = _host_and_port(address)
    if found is None:
        return
    try:
        socket.create_connection(found, timeout=_KNOCK_S).close()
    except OSError as error:
        raise EngineError(
            f"no Ray answers at {origin} = {address!r}: {error}; start one there (`ray start "
            "--head`), or leave the address out to have one started"
        ) from error


def _last_words_of_ray(since: float) -> str:
    """Of the control server that was started since then; the folder may be others', too."""
    for path in sorted(envs.ray_folders()[0].glob(_CONTROL_LOGS)):
        lines = tail(str(path)).splitlines()
        if lines and path.stat().st_mtime >= since:
            return f"its log {path} ends with: {lines[-1]}"
    return "it left no log"
