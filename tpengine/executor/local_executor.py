"""One worker in the driver's own process, and the choice between it and ranks elsewhere.

The choice stands here and not with `Executor`, since it imports the executors, each only when it is
chosen: a driver whose ranks have processes of their own needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.engine_args import EngineArgs
from tpengine.errors import EngineError
from tpengine.executor.executor import Executor
from tpengine.logger import init_logger

logger = init_logger(__name__)


if TYPE_CHECKING:
    from tpengine.worker.worker import Worker


class LocalExecutor(Executor):
    """Runs the model in this process, on one device; without Ray."""

    def __init__(self, config: EngineConfig) -> None:
        from tpengine.worker.worker import Worker

        super().__init__()
        self._worker: Worker | None = Worker(config)

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._worker is None:
            raise EngineError("the engine was shut down; make a new one")
        return [getattr(self._worker, method)(*args, **kwargs)]

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()


def create_executor(args: EngineArgs) -> tuple[EngineConfig, Executor]:
    """Returns the configuration for the device that was found, and the executor for it.

    Raises:
        ConfigError: an argument is out of range, the ranks cannot share the model's heads, or the
            arguments need Ray and it is not installed.
        EngineError: the model or Ray is not available.
    """
    args.check()  # before Ray is started
    envs.hide_secrets()
    chosen = args.chosen_executor
    if chosen == "local":
        from tpengine.worker.device import detect_device

        config = args.create_engine_config(detect_device(args.device))
        return config, LocalExecutor(config)
    args.check_installed()
    args.read_model()  # refuses a model that the ranks cannot share, before any process starts
    from tpengine.executor.group_executor import GroupExecutor

    if chosen == "processes":
        from tpengine.executor.launch import processes

        if args.executor == "auto":
            text = "Ray is not installed: %d ranks run as processes of this machine"
            logger.info(text, args.world_size)
        config = args.create_engine_config(processes.detect_device(args.device))
        return config, GroupExecutor(config, processes.ProcessHome(config))
    from tpengine.executor.launch import ray_connection, ray_home

    connection = ray_connection.RayConnection(args.ray_address)
    try:
        config = args.create_engine_config(ray_home.detect_device(args.device))
        return config, GroupExecutor(config, ray_home.RayHome(config, connection))
    except BaseException:
        connection.close()
        raise
