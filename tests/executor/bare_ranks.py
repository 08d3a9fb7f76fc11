"""Ranks without an engine: steps go to the executor as a scheduler would send them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_S, wait_until

from tpengine import EngineArgs
from tpengine.errors import RankLoss
from tpengine.executor.launch.chosen_executor import create_executor
from tpengine.executor.launch.node_agent import NodeAgent
from tpengine.messages import MemoryLedger, NewSequence, SamplingRules, StepInput

PROMPT = [5, 6, 7, 8, 9]
NUM_TOKENS = 16


class BareRanks:
    """A loaded executor, and one greedy sequence at a time through it."""

    def __init__(self, folder: Path | str, tp_size: int = 2, **args: Any) -> None:
        args = {"dtype": "float32", "device": "cpu", "num_device_blocks_override": 64, **args}
        args = {"executor": "processes", **args}
        _, executor = create_executor(EngineArgs(str(folder), tensor_parallel_size=tp_size, **args))
        self.executor = executor
        self._step = 0
        self._freed: list[int] = []

    def open(self) -> None:
        """Up to the first step."""
        self.executor.load()
        self._open_cache(self.executor.profile_num_available_blocks())

    def rebuild(self, num_ranks: int | None = None) -> None:
        """Likewise, after a loss, or for another number of ranks. No rank of the last is left."""
        processes = [place.process for place in self.executor.places]
        self._open_cache(self.executor.rebuild(num_ranks))
        assert not NodeAgent().wait_for_end(processes, PATIENCE_S), "ranks are still there"
        self._freed = []

    def _open_cache(self, ledgers: list[MemoryLedger]) -> None:
        self.executor.init_cache_engine(min(ledger.num_device_blocks for ledger in ledgers))

    def spare_processes(self) -> list[tuple[int, int]]:
        """Of the spares or the template that are ready."""
        ready = [spare for spare in self.executor.home.spares._spares if spare.is_prepared()]
        return [place.process for spare in ready if (place := spare.answer()) is not None]

    def have_transformers(self) -> list[bool]:
        """Whether each rank and each ready spare or template has loaded a library that only
        transformers needs."""
        ranks = [place.process for place in self.executor.places]
        processes = [*ranks, *self.spare_processes()]
        return ["/regex/" in Path(f"/proc/{pid}/maps").read_text() for pid, _ in processes]

    @property
    def next_step(self) -> int:
        """Number of the next step."""
        return self._step + 1

    def generate(self) -> list[int]:
        """The prompt's continuation."""
        output: list[int] = []
        params = SamplingRules(temperature=0.0)
        new = NewSequence(0, PROMPT, len(PROMPT), 0, list(range(1, 9)), params, 0, 0, [])
        sampled = {"sample_rows": [0], "sample_slots": [0]}
        size = [len(PROMPT)]
        step = StepInput(self._count(), [0], size, [new], freed_slots=self._freed, **sampled)
        self._freed = [0]
        while True:
            output += self.executor.execute_model(step).token_ids
            if len(output) == NUM_TOKENS:
                break
            step = StepInput(self._count(), [0], [1], **sampled)
        return output

    def _count(self) -> int:
        self._step += 1
        return self._step

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank."""
        os.kill(self.executor.places[rank].pid, number)

    def lose(self, rank: int) -> RankLoss:
        """Kills a rank."""
        self.signal(rank, signal.SIGKILL)
        return self.wait_for_loss()

    def wait_for_loss(self) -> RankLoss:
        wait_until(lambda: self.executor.loss is not None, what="no loss found")
        return self.executor.loss


@contextmanager
def bare_ranks(folder: Path | str, tp_size: int = 2, **args: Any) -> Iterator[BareRanks]:
    """Ranks that are ready for steps, ended afterwards."""
    ranks = BareRanks(folder, tp_size, **args)
    try:
        ranks.open()
        yield ranks
    finally:
        ranks.executor.shutdown()
