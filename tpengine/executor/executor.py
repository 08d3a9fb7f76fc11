"""The calls that an engine makes of its workers; here all of them stand on `_run_workers`.

`GroupExecutor` sends steps on the channels of its ranks instead, and replaces ranks.
The choice between the executors stands in `launch/chosen_executor.py`.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tpengine.checkpoint.adapter_files import AdapterChecks
from tpengine.config import LoRAConfig
from tpengine.errors import EngineError, RankLoss
from tpengine.messages import MemoryLedger, StepInput, StepOutput
from tpengine.structured.grammars import Vocabulary


def pause_s(num_failed: int) -> float:
    """Before the next attempt at a group of ranks: 1, 2, 4, 8, 16 and then 30 s."""
    return min(30.0, 2.0 ** min(num_failed - 1, 10))


class Executor(ABC):
    """Calls every worker. The engine knows only this class, no worker.

    Attributes:
        devices: a line about each rank's device, in rank order; empty before `load`.
        nodes: the address or name of each rank's machine, in rank order.
        epoch: the number of the current group of ranks, counting from 1.
        start_times_s: seconds of each phase of the latest start, in order; empty if the executor
            does not measure them.
    """

    devices: Sequence[str] = ()
    nodes: Sequence[str] = (platform.node(),)
    epoch: int = 1
    start_times_s: Mapping[str, float] = MappingProxyType({})

    def __init__(self) -> None:
        self._sent: deque[StepInput] = deque()
        self._answers: deque[StepOutput] = deque()

    @abstractmethod
    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls `method` on every worker and returns the answers in rank order."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they hold; a second call does nothing. A `rebuild` in
        another thread then fails with an `EngineError`, and a `resume` says why it cannot be."""

    def load(self) -> list[str]:
        """Initialises the devices and loads the model; returns a line about each rank's device."""
        devices: list[str] = self._run_workers("init_device")
        self._run_workers("load_model")
        self._run_workers("calibrate")
        self.devices = devices
        return devices

    def adapter_checks(self, config: LoRAConfig | None) -> AdapterChecks:
        """Returns checks of adapters against the layers of the loaded model."""
        if config is None:
            return AdapterChecks({}, 0)
        return AdapterChecks(self._run_workers("adapter_targets")[0], config.max_lora_rank)

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        """Returns each rank's memory; the engine takes the smallest block count."""
        return self._run_workers("profile_num_available_blocks")

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocates these numbers of blocks on every rank's device and host."""
        self._run_workers("init_cache_engine", num_blocks, num_host_blocks)

    def populate_cache(self) -> None:
        """On CPU: writes to the first blocks, so that the kernel provides their memory before the
        first prompts. Not called after a recovery, when streams wait."""
        self._run_workers("populate_cache")

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Sends the present group what it needs before the first sequence with a grammar."""
        self._run_workers("load_vocabulary", vocabulary)

    def compile_grammars(self, grammars: list[str], dropped: list[str], wait_s: float) -> int:
        """Has the rank that samples compile grammars beside its steps; see `Vocabulary.compile`."""
        num_left: list[int] = self._run_workers("compile_grammars", grammars, dropped, wait_s)
        return max(num_left)

    def send_step(self, step: StepInput) -> None:
        """Has every rank run a step, after those that were sent before; here, in `take_answer`.

        Raises:
            GroupLostError: a rank was lost. `resume` may replace it; else `rebuild` ends its group
                and starts the next one.
        """
        self._sent.append(step)

    def take_answer(self) -> StepOutput:
        """Waits for the oldest step without an answer; returns rank 0's answer.

        Raises:
            GroupLostError: see `send_step`.
        """
        while not self._answers:
            if self._sent:
                self._answers += self._run_workers("execute_model", self._sent.popleft())[0]
            else:
                self._answers += self._run_workers("finish_steps")[0]
        return self._answers.popleft()

    def execute_model(self, step: StepInput) -> StepOutput:
        """Runs one step on every rank, with no other in flight; returns rank 0's answer.

        Raises:
            GroupLostError: see `send_step`.
        """
        self.send_step(step)
        return self.take_answer()

    @property
    def loss(self) -> RankLoss | None:
        """The rank of the current group that was lost, also between steps; None: no rank was lost.
        After a loss `resume` may be called, and then `rebuild`."""
        return None

    @property
    def start_phase(self) -> str | None:
        """The phase of the start that goes on; None: none does, or it is not measured."""
        return None

    @property
    def first_epoch(self) -> int:
        """The epoch in which the ranks began: what they were told since then they know."""
        return self.epoch

    def resume(self) -> str | None:
        """After a loss: replaces the lost ranks alone, and sends the unanswered steps again, so
        that nothing is computed that was computed before. The answers follow as if no rank had been
        lost. A new rank that hangs is killed in time for `rebuild`. May be called in any thread.

        Returns:
            Why this cannot be; then `rebuild` may be called. None: it is done.
        """
        return "the only worker runs in the driver's process"

    def has_room(self, num_more: int) -> bool:
        """Whether so many ranks could be started now, beside the present ones, as far as can be
        known without starting them. May be called in any thread."""
        return False

    def rebuild(
        self, num_ranks: int | None = None, left_s: float | None = None
    ) -> list[MemoryLedger]:
        """Ends the group, or its rest, and starts the next one, up to its loaded weights. Then
        `init_cache_engine` makes it ready for steps. May be called in any thread.

        Args:
            num_ranks: of the next group; None: as many as the last one has. If fewer would do, too,
                ranks that hang are killed in time for another attempt: after half of `left_s`.
            left_s: for this attempt and all later ones; None: `recovery_timeout`.

        Returns:
            Each rank's memory, measured again after the old processes ended; the peak of the
            activations is that of the first group with as many ranks.

        Raises:
            GroupLostError: a rank of the new group was lost; `rebuild` may be called again.
            EngineError: any other error; another `rebuild` would fail, too.
        """
        raise EngineError("the only worker runs in the driver's process: it cannot be rebuilt")
