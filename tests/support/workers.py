"""Workers without an engine around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import ParallelState
from tpengine.engine_args import EngineArgs
from tpengine.worker.worker import Worker


def loaded_worker(
    model: EngineConfig | Path, parallel: ParallelState | None = None, **args: Any
) -> Worker:
    """A worker that has its weights, and no cache yet.

    Args:
        model: its configuration; or a folder: on the CPU in float32, unless `args` say otherwise.
    """
    if not isinstance(model, EngineConfig):
        model = EngineArgs(str(model), **{"dtype": "float32", **args}).create_engine_config("cpu")
    worker = Worker(model, parallel)
    worker.init_device()
    worker.load_model()
    worker.calibrate()
    return worker
