"""One worker in the driver's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpengine.config import EngineConfig
from tpengine.errors import EngineError
from tpengine.executor.executor import Executor

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
