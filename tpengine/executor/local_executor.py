"""One worker in the driver's own process: no Ray, no second process."""

from __future__ import annotations

from typing import Any

from tpengine.config import EngineConfig
from tpengine.errors import EngineError
from tpengine.executor.executor import Executor
from tpengine.worker.device import detect_device
from tpengine.worker.worker import Worker


class LocalExecutor(Executor):
    """Runs the model in this process, on one device."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: Worker | None = Worker(config)

    @staticmethod
    def detect_device(wanted: str) -> str:
        """Settles `auto`: cuda where this machine has it, else cpu.

        Raises:
            ConfigError: cuda was asked for and is not there.
        """
        return detect_device(wanted)

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        if self._worker is None:
            raise EngineError("the engine was shut down; make a new one")
        return [getattr(self._worker, method)(*args, **kwargs)]

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
