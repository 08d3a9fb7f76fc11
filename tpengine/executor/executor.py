"""Where the workers live: few verbs, all standing on `_run_workers`."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpengine.errors import EngineError, RankLoss
from tpengine.messages import MemoryLedger, StepInput, StepOutput


class Executor(ABC):
    """Runs calls on every worker. The engine knows this class only, never a worker.

    Attributes:
        devices: a line about each rank's device, in rank order; empty before `load`.
        start_times_s: seconds that each phase of the latest start took, in order; empty where
            nobody measures.
    """

    devices: Sequence[str] = ()
    start_times_s: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method` on every worker and returns the answers in rank order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they hold; a second call does nothing. A `rebuild` that
        runs in another thread fails soon, with an `EngineError`."""

    def load(self) -> list[str]:
        """Claims the devices and loads the model; returns a line about each rank's device."""
        devices: list[str] = self._run_workers("init_device")
        self._run_workers("load_model")
        self.devices = devices
        return devices

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """Each rank's account of its memory; the engine takes the smallest block count."""
        return self._run_workers("profile_num_available_blocks")

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates as many blocks on every rank's device and on its host."""
        self._run_workers("init_cache_engine", num_blocks, num_host_blocks)

    def populate_cache(self) -> None:
        """On CPU: has memory put behind the first blocks, so that the first prompts do not wait for
        it. Not after a recovery, where every stream waits."""
        self._run_workers("populate_cache")

    @property
    def nodes(self) -> list[str]:
        """Each rank's machine, by address or name, in rank order."""
        return [platform.node()]

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step on every rank; the answer is rank 0's.

        Raises:
            GroupLostError: a rank was lost; the whole group has been or is being ended, and
                `rebuild` makes another.
        """
        output: StepOutput = self._run_workers("execute_model", step)[0]
        return output

    @property
    def loss(self) -> RankLoss | None:
        """The rank that was lost since the group was built, also between steps; None: all is well.

        Whoever sees it may call `rebuild`.
        """
        return None

    @property
    def epoch(self) -> int:
        """Counts the groups of ranks that there have been, from 1."""
        return 1

    def rebuild(self) -> list[MemoryLedger]:
        """Ends what is left of a lost group and starts the next one, up to its loaded weights;
        `init_cache_engine` then makes it ready for steps. Runs in any thread.

        Returns:
            Each rank's memory, measured anew once the old processes were gone; the activations'
            peak is the first group's.

        Raises:
            GroupLostError: a rank of the new group was lost in its turn; may be tried again.
            EngineError: any other; there is no use in trying again.
        """
        raise EngineError("there is one worker, in the driver's own process: nothing to rebuild")
