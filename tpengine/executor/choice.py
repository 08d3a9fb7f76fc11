"""Where an engine's workers live, by its arguments."""

from __future__ import annotations

import importlib.util

from tpengine.config import EngineConfig
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError
from tpengine.executor.executor import Executor
from tpengine.executor.local_executor import LocalExecutor


def create_executor(args: EngineArgs) -> tuple[EngineConfig, Executor]:
    """The configuration for the device that was found, and what runs it. Without Ray, Ray is not
    imported.

    Raises:
        ConfigError: an argument is out of range, or Ray is asked for and not installed.
        EngineError: the model or Ray cannot be had.
    """
    if not args.uses_ray:
        config = args.create_engine_config(LocalExecutor.detect_device(args.device))
        return config, LocalExecutor(config)
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("msgpack") is None:
        raise ConfigError(
            f"tensor_parallel_size = {args.tensor_parallel_size} with executor = "
            f"{args.executor!r} needs Ray: pip install 'tpengine[ray]'"
        )
    from tpengine.executor.ray_connection import RayConnection
    from tpengine.executor.ray_executor import RayExecutor

    connection = RayConnection(args.ray_address)
    try:
        config = args.create_engine_config(RayExecutor.detect_device(args.device))
        return config, RayExecutor(config, connection)
    except BaseException:
        connection.close()
        raise
