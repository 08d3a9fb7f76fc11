"""The choice between a worker in the driver's own process and ranks in processes of their own.

Each executor is imported only when it is chosen: a driver whose ranks are elsewhere needs no torch.
"""

from __future__ import annotations

from tpengine import envs
from tpengine.config import EngineConfig
from tpengine.engine_args import EngineArgs
from tpengine.executor.executor import Executor
from tpengine.logger import init_logger

logger = init_logger(__name__)


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
        from tpengine.executor.local_executor import LocalExecutor
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
