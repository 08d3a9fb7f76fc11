"""Where the workers live: few verbs, all standing on `_run_workers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tpengine.messages import MemoryLedger, StepInput, StepOutput


class Executor(ABC):
    """Runs calls on every worker. The engine knows this class only, never a worker."""

    @abstractmethod
    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method` on every worker and returns the answers in rank order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they hold; a second call does nothing."""

    def load(self) -> list[str]:
        """Claims the devices and loads the model; returns a line about each rank's device."""
        devices: list[str] = self._run_workers("init_device")
        self._run_workers("load_model")
        return devices

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """Each rank's account of its memory; the engine takes the smallest block count."""
        return self._run_workers("profile_num_available_blocks")

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates as many blocks on every rank's device and on its host."""
        self._run_workers("init_cache_engine", num_blocks, num_host_blocks)

    def weights_bytes(self) -> list[int]:
        """Bytes of each rank's weights."""
        return self._run_workers("weights_bytes")

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step on every rank; the answer is rank 0's."""
        output: StepOutput = self._run_workers("execute_model", step)[0]
        return output
