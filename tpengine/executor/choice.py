"""Where an engine's workers live, by its arguments."""

from __future__ import annotations

import importlib.util

from tpengine.config import EngineConfig, read_hf_config, resolve_model_folder
from tpengine.engine_args import EngineArgs
from tpengine.errors import ConfigError
from tpengine.executor.executor import Executor
from tpengine.executor.local_executor import LocalExecutor


def create_executor(args: EngineArgs) -> tuple[EngineConfig, Executor]:
    """The configuration for the device that was found, and what runs it. Without Ray, Ray is not
    imported.

    Raises:
        ConfigError: an argument is out of range, the model's heads cannot be divided, or Ray is
            asked for and not installed.
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
    check_division(args)
    from tpengine.executor.launch.ray_connection import RayConnection
    from tpengine.executor.launch.ray_executor import RayExecutor

    connection = RayConnection(args.ray_address)
    try:
        config = args.create_engine_config(RayExecutor.detect_device(args.device))
        return config, RayExecutor(config, connection)
    except BaseException:
        connection.close()
        raise


def check_division(args: EngineArgs) -> None:
    """Finds out before any process is started that the ranks cannot share the model's heads.

    Raises:
        ConfigError: see the message.
        ModelLoadError: the model's folder cannot be read.
    """
    size = args.tensor_parallel_size
    if size <= 1:  # below 1 is refused with the other arguments
        return
    folder = resolve_model_folder(
        args.model, args.download_dir, args.load_format, args.trust_remote_code
    )
    hf_config = read_hf_config(folder, args.trust_remote_code)
    for what, name in (
        ("attention heads", "num_attention_heads"),
        ("KV heads", "num_key_value_heads"),
    ):
        total = hf_config.get(name)
        if not isinstance(total, int) or total < 1 or total % size == 0:
            continue
        if what == "KV heads" and size > total and size % total == 0:  # each on several ranks
            continue
        raise ConfigError(
            f"{total} {what} of the model cannot be divided over tensor_parallel_size = {size}; "
            f"sizes that can: {', '.join(str(n) for n in range(1, total + 1) if total % n == 0)}"
        )
