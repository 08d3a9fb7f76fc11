"""This process's connection to Ray: to one that runs, or to one that is started and ended here.

Ray allows one connection per process and gives no handle of the processes that it starts. Of a
start that failed, this file ends all processes itself, since Ray would leave some of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import ray

from tpengine import envs
from tpengine.errors import ConfigError, EngineError
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.executor.launch.ray_calls import RaySilentError, bounded, check_answers, check_new
from tpengine.host import close_to_others, is_stopped, kept_sigterm_handler, read_trusted
from tpengine.logger import init_logger

logger = init_logger(__name__)

RAY_IS_GONE = "Ray was shut down under the engine; make a new one"

_STARTED = "ray_current_cluster"
"""The file in which `ray start` notes the cluster that it made this machine a part of, for all
programs of this machine. A Ray that a program has started for itself is in no such file: it ends
with that program, and has only the resources that the program asked for."""
_REACH_S = 2.0
"""How long an address may take to accept a connection; Ray itself tries for most of a minute."""
_STARTS = 2
"""On a busy machine Ray's control server may not be up within the half minute that Ray waits. A
second start then succeeds."""
_FAILED_STARTS = (RuntimeError, OSError, ray.exceptions.RayError)
_CONTROL_LOGS = "session_latest/logs/gcs_server.*"

# One connection per process, so the count of its users belongs to the process, too.
_users_of_started_ray: set[int] = set()
_connecting = threading.Lock()
CONNECTING_S = 300.0
"""More than two starts of Ray take that both fail."""
_RAY_FOLDER = str(Path(ray.__file__).parent)


class RayConnection:
    """Keeps Ray connected for one engine.

    A Ray that runs already is used and left running: the one at the address, or else the one that
    `ray start` started. A Ray that an engine started ends with the last engine of its process;
    engines of other processes use it only by its address.

    Raises:
        ConfigError: an address of this kind cannot work.
        EngineError: no Ray answers at the address, or none could be started.
    """

    def __init__(self, address: str | None) -> None:
        if not _connecting.acquire(timeout=CONNECTING_S):
            raise EngineError(
                f"another thread of this process has been connecting to Ray for {CONNECTING_S:g} "
                "s; make the engines one after another"
            )
        try:
            self._join(address)
            atexit.unregister(ray.shutdown)
            atexit.register(_disconnect)
        finally:
            _connecting.release()

    def _join(self, address: str | None) -> None:
        """Runs in one thread at a time: a failed start ends all new processes of Ray."""
        origin = "ray_address"
        if address is None and not ray.is_initialized():
            address, origin = envs.ray_address(), "RAY_ADDRESS"
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                f"ray_address = {address!r}: a driver that uses Ray Client is not part of the "
                "cluster, so the ranks cannot reach it; run the driver on a node of the cluster "
                "(as `ray submit` does) and leave ray_address out"
            )
        if ray.is_initialized():
            if _users_of_started_ray:
                _users_of_started_ray.add(id(self))
        else:
            envs.outlive_control_store()
            with kept_sigterm_handler():
                self._open(address, origin)
            if not envs.ray_wants_token():
                logger.warning(
                    "Ray's authentication is off: any process that reaches its ports can run "
                    "programs as this user; set RAY_AUTH_MODE=token, here and where Ray starts"
                )
        self._identity = self._identify()

    def _open(self, address: str | None, origin: str) -> None:
        if address is not None and address != "local":
            _check_reachable(address, origin)
            self._connect(address, origin)
        elif address == "local":
            self._start(f"{origin} = 'local' asks for one")
        elif not self._find():
            self._start("no address is given, and none that `ray start` began runs here")

    @staticmethod
    def _identify() -> tuple[str, str]:
        """(node, job). Another cluster has another node, another connection another job."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    @property
    def is_alive(self) -> bool:
        """Whether Ray is still connected to the same cluster. If it is not, its calls would join
        another cluster or start one."""
        return ray.is_initialized() and self._identify() == self._identity

    @classmethod
    def _find(cls) -> bool:
        """Connects to the Ray that `ray start` started on this machine; whether there is one."""
        for folder in envs.ray_folders():
            try:
                address = read_trusted(folder / _STARTED).strip()
                if _host_and_port(address) is None:  # some other file of that name
                    continue
                _check_reachable(address, str(folder / _STARTED))
                cls._connect(address, "found running here; ray_address='local' starts another")
            except PermissionError as error:  # its Ray would run code as its owner
                logger.warning("the Ray of a file that cannot be trusted is not used: %s", error)
                continue
            except (OSError, UnicodeDecodeError, EngineError):  # no file, or its Ray has ended
                continue
            return True
        return False

    @staticmethod
    def _connect(address: str, origin: str) -> None:
        """Connects to a Ray that runs already."""
        if _host_and_port(address) is not None:
            check_new(address)
        try:
            ray.init(address=address, log_to_driver=True, logging_level="warning")
        except ConnectionError as error:
            raise EngineError(f"no Ray answers at {origin} = {address!r}: {error}") from error
        store = ray.get_runtime_context().gcs_address
        logger.info("connected to Ray at %s (%s)", store, origin)

    def _start(self, why: str) -> None:
        """Starts a Ray that ends with the last engine of this process."""
        envs.prepare_local_ray()
        logger.info("starting a Ray for this engine: %s", why)
        for left in reversed(range(_STARTS)):
            begun, others = time.time(), _ray_children()
            try:
                local = ray.init(address="local", include_dashboard=False, logging_level="warning")
                # Ray lets all users of the machine read both, and change what is in the folder.
                for path in (local.address_info["session_dir"], envs.ray_token_file()):
                    close_to_others(Path(path))
                _users_of_started_ray.add(id(self))
                return
            except Exception as error:
                if ray.is_initialized():  # the program started one meanwhile: leave its processes
                    raise EngineError(
                        f"another thread of this program started Ray at the same time: {error}"
                    ) from error
                _end_ray_children(but=others)
                # Ray raises a bare Exception when its raylet is late.
                if type(error) is not Exception and not isinstance(error, _FAILED_STARTS):
                    raise
                said = _last_words_of_ray(begun)
                if not left:
                    raise EngineError(
                        f"Ray did not start on this machine, {_STARTS} times: {error}; {said}"
                    ) from error
                logger.warning("Ray did not start: %s; %s; starting it again", error, said)

    def close(self) -> None:
        """Ends the connection; a second call does nothing."""
        if id(self) in _users_of_started_ray:
            _users_of_started_ray.discard(id(self))
            if not _users_of_started_ray and ray.is_initialized():
                _disconnect()


def _end_driver() -> None:
    """Does of `ray.shutdown` what asks nothing of the control store."""
    worker = ray._private.worker.global_worker
    worker.core_worker.shutdown_driver()
    del worker.core_worker
    worker.set_is_connected(False)  # else handles of actors would end the process, with status 1


def _disconnect() -> None:
    """Ends the connection, and the processes of a Ray that this process has started; also at the
    end of the process, in place of `ray.shutdown`, which waits for a Ray that is frozen."""
    if not ray.is_initialized():
        return
    end: Callable[[], object] = ray.shutdown
    try:
        if stopped := [pid for pid in _ray_children() if is_stopped(pid)]:
            raise RaySilentError(f"processes of it are stopped: {stopped}")
        check_answers()
    except RaySilentError as error:
        logger.warning("Ray is ended without its answer: %s", error)
        if not _end_ray_children(but=set()):  # another program has started it
            end = _end_driver
    try:  # without it the process would crash at its end
        bounded(end, "its end", is_last=True)
    except RaySilentError as error:
        logger.warning("the end of Ray is not waited for: %s", error)
        _end_ray_children(but=set())


def _host_and_port(address: str) -> tuple[str, int] | None:
    """The parts of HOST:PORT; None: the address has another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return None
    return host.strip("[]"), int(port)


def _check_reachable(address: str, origin: str) -> None:
    """Connects once, which takes seconds where Ray would try for a minute.

    Raises:
        EngineError: nothing accepts a connection at HOST:PORT. Other forms are left to Ray.
    """
    host_and_port = _host_and_port(address)
    if host_and_port is None:
        return
    try:
        socket.create_connection(host_and_port, timeout=_REACH_S).close()
    except OSError as error:
        raise EngineError(
            f"no Ray answers at {origin} = {address!r}: {error}; start one there (`ray start "
            "--head`), or leave the address out to have one started"
        ) from error


def _last_words_of_ray(since: float) -> str:
    """The last line of a control server's log that was written since then."""
    for path in sorted(envs.ray_folders()[0].glob(_CONTROL_LOGS)):
        lines = NodeAgent().tail(str(path)).splitlines()
        if lines and path.stat().st_mtime >= since:
            return f"its log {path} ends with: {lines[-1]}"
    return "it left no log"


def _ray_children() -> set[int]:
    """This process's children that run programs of Ray; empty on systems without /proc."""
    children = set()
    for pid in _children_of()[os.getpid()]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if _RAY_FOLDER in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                children.add(pid)
    return children


def _end_ray_children(but: set[int]) -> list[int]:
    """Kills children that run programs of Ray, and their descendants; returns them.

    Args:
        but: children that are left alone.
    """
    doomed = list(_ray_children() - but)
    for pid in doomed:  # the list grows meanwhile; a stopped process starts no other
        _send(pid, signal.SIGSTOP)
        doomed += _children_of()[pid]
    for pid in doomed:
        _send(pid, signal.SIGKILL)
    return doomed


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children_of() -> defaultdict[int, list[int]]:
    """All processes of this machine, by their parent."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", where the name may hold any bytes
            parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
            children[int(parent)].append(int(folder.name))
    return children
