"""Groups of fake ranks, in this process, which a test can lose."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from scheduling.fake_worker import FakeWorker
from support.workers import loaded_worker

from tpengine import LLMEngine
from tpengine.config import EngineConfig
from tpengine.engine import recovery
from tpengine.errors import EngineError, GroupLostError, RankLoss
from tpengine.executor.batch_mirror import BatchMirror
from tpengine.executor.executor import Executor
from tpengine.messages import MemoryLedger, NewSequence, StepInput, StepOutput

BLOCK_BYTES = 1000
TIMEOUT_S = 30.0


MakeGroup = Callable[[EngineConfig, int], Any]
"""Makes what a test loses as a whole, for a configuration and its first step."""


class FakeGroup:
    """The fake worker of the scheduler's tests: it checks every message and reads every block."""

    def __init__(self, config: EngineConfig, first_step: int) -> None:
        self._config = config
        self._last_step = first_step - 1
        self.worker: FakeWorker | None = None

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int) -> None:
        limits = self._config.scheduler
        sizes = self._config.cache.block_size, limits.max_num_seqs, limits.max_num_batched_tokens
        self.worker = FakeWorker(num_blocks, *sizes, num_host_blocks, last_step=self._last_step)

    def execute_model(self, step: StepInput) -> list[StepOutput]:
        self.worker.apply(step)
        return [self.worker.compute(step)]

    def begin(self, step: StepInput) -> None:
        """Does a part of a step, or all of it."""
        part = step.step % 4
        if part == 3:
            self.execute_model(step)
        elif part:
            self.worker.move_blocks(step, only_swaps=part == 1)

    def begin_again(self, batch: list[NewSequence], unanswered: Iterable[StepInput]) -> None:
        """Takes a batch in place of the one that it has, for steps that were sent before."""
        worker = self.worker
        # Not by a message, which is checked: these steps may have overwritten what they free.
        worker.slots.clear()
        for new in batch:
            worker.enter(new)
        worker.num_repeated = max((s.step for s in unanswered), default=0)
        worker.last_step = min((s.step for s in unanswered), default=worker.last_step + 1) - 1


class RealGroup:
    """One real worker with the model."""

    def __init__(self, config: EngineConfig, first_step: int) -> None:
        worker = loaded_worker(config)
        self.init_cache_engine = worker.init_cache_engine
        self.execute_model = worker.execute_model
        self.finish_steps = worker.finish_steps
        self.load_vocabulary = worker.load_vocabulary
        self.compile_grammars = worker.compile_grammars


@dataclass
class Fate:
    """When and how groups are lost.

    Attributes:
        kills: numbers of steps that are not answered.
        rebuilds: where each attempt at a new group fails: `rebuild`, `cache` or nowhere; or the
            error of the driver that ends it.
        blocks: (on the device, on the host) of each group; the last entry counts for all later
            groups too.
        poison: by first token of a prompt: a step is not answered if the request has that many
            output tokens.
        is_lethal: whether a step is not answered, in addition to the above.
        keeps_memory: whether a lost group is resumed over the blocks that it has left. How much of
            the lost step it has done depends on the step's number.
    """

    kills: frozenset[int] = frozenset()
    rebuilds: deque[str | Exception] = field(default_factory=deque)
    blocks: list[tuple[int, int]] = field(default_factory=lambda: [(100, 0)])
    poison: dict[int, int] = field(default_factory=dict)
    is_lethal: Callable[[StepInput], bool] = lambda step: False
    keeps_memory: bool = False


class MortalExecutor(Executor):
    """Loses its group as `Fate` says, and makes new groups.

    Attributes:
        fate: may be changed at any time.
        gate: what replaces ranks waits for it; open unless a test closes it.
        steps: (epoch, step) of all steps that were sent.
        losses: of all groups, oldest first.
        threads: names of the threads that replaced ranks.
        attempted_at: when it was called, by the clock of recoveries.
        is_shut_down: set by `shutdown`.
    """

    def __init__(self, config: EngineConfig, fate: Fate, group: MakeGroup) -> None:
        super().__init__()
        self.config = config
        self.fate = fate
        self._make_group = group
        self._group: Any = None
        self._epoch = 0
        self._loss: RankLoss | None = None
        self._slots: dict[int, tuple[int, int]] = {}  # first token of the prompt, output tokens
        self.is_shut_down = threading.Event()
        self._num_sent = 0
        self.gate = threading.Event()
        self.gate.set()
        self.steps: list[tuple[int, int]] = []
        self.losses: list[RankLoss] = []
        self._mirror = BatchMirror()
        self._unanswered: deque[StepInput] = deque()
        self._lost_group: Any = None
        self.threads: set[str] = set()
        self.attempted_at: list[float] = []

    def resume(self) -> str | None:
        lost, self._lost_group = self._lost_group, None
        if not self.fate.keeps_memory or lost is None or not self._mirror.num_steps:
            return "it was not told to keep them"
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(TIMEOUT_S)
        self._mirror.num_steps = 0
        self._epoch, self._loss, self._group = self._epoch + 1, None, lost
        lost.begin_again(self._mirror.sequences(), self._unanswered)
        for step in self._unanswered:
            self._answers += lost.execute_model(step)
        return None

    def take_answer(self) -> StepOutput:
        if self._loss is not None:
            raise GroupLostError(self._loss)
        answer = super().take_answer()
        self._mirror.follow(self._unanswered.popleft(), answer)
        return answer

    def _run_workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        assert method in ("load_vocabulary", "compile_grammars", "finish_steps")
        return [getattr(self._group, method)(*args, **kwargs)]

    @property
    def loss(self) -> RankLoss | None:
        return self._loss

    @property
    def epoch(self) -> int:
        return self._epoch

    start_times_s = MappingProxyType({"weights": 0.25})

    def load(self) -> list[str]:
        self._start()
        self.devices = self.nodes = ["somewhere", "elsewhere"]
        return self.devices

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        entry = min(self._epoch, len(self.fate.blocks)) - 1
        device, host = self.fate.blocks[entry]
        return [MemoryLedger(i, "cpu", 0, 0, 0, 0, BLOCK_BYTES, device + i, host) for i in range(2)]

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._group.init_cache_engine(num_blocks, num_host_blocks)
        self._fail_if_due("cache")

    def populate_cache(self) -> None:
        """Does nothing: the fake ranks have no memory."""

    def rebuild(
        self, num_ranks: int | None = None, left_s: float | None = None
    ) -> list[MemoryLedger]:
        self.threads.add(threading.current_thread().name)
        self.attempted_at.append(recovery.time.monotonic())
        assert self.gate.wait(TIMEOUT_S)
        if self.is_shut_down.is_set():
            raise EngineError("the engine was shut down")
        assert self._loss is not None, "nothing was lost"
        if self.fate.rebuilds and isinstance(self.fate.rebuilds[0], Exception):
            raise self.fate.rebuilds.popleft()
        self._start()
        self._fail_if_due("rebuild")
        return self.profile_num_available_blocks()

    def send_step(self, step: StepInput) -> None:
        self._num_sent = step.step
        self._unanswered.append(step)
        self._follow_slots(step)
        if self._loss is not None:  # lost after the driver looked at `loss`
            raise GroupLostError(self._loss)
        self.steps.append((self._epoch, step.step))
        if step.step in self.fate.kills or self.fate.is_lethal(step) or self._is_poisonous(step):
            if self.fate.keeps_memory and isinstance(self._group, FakeGroup):
                self._group.begin(step)
            raise GroupLostError(self.lose("execute_model", step.step))
        self._answers += self._group.execute_model(step)
        for slot in step.sample_slots:
            first_token, num_output = self._slots[slot]
            self._slots[slot] = (first_token, num_output + 1)

    def shutdown(self) -> None:
        self.is_shut_down.set()
        self.gate.set()
        self._group = None

    def lose(self, phase: str = "idle", step: int | None = None) -> RankLoss:
        """Loses the group."""
        self._group, self._lost_group = None, self._group
        self._answers.clear()
        place, cause = "10.0.0.7 (host seven), pid 4711", "killed by signal 9 (SIGKILL)"
        words = "these were its last words", "File worker.py, line 1"
        self._loss = RankLoss(1, place, self._epoch, step, phase, cause, *words)
        self.losses.append(self._loss)
        return self._loss

    def _start(self) -> None:
        self._epoch += 1
        self._slots.clear()
        self._unanswered.clear()
        self._mirror.clear()
        self._group = self._make_group(self.config, self._num_sent + 1)
        self._loss = None

    def _fail_if_due(self, where: str) -> None:
        """Loses the new group if this attempt is to fail here; `cache` ends an attempt."""
        if self._epoch == 1 or not self.fate.rebuilds:
            return
        if where == self.fate.rebuilds[0]:
            self.fate.rebuilds.popleft()
            raise GroupLostError(self.lose(where))
        if where == "cache":
            self.fate.rebuilds.popleft()

    def _follow_slots(self, step: StepInput) -> None:
        for slot in step.freed_slots:
            del self._slots[slot]
        for new in step.new_sequences:
            num_output = len(new.token_ids) - new.num_prompt_tokens
            self._slots[new.slot] = (new.token_ids[0], num_output)
        parents = [self._slots[fork.parent_slot] for fork in step.forks]
        for fork, parent in zip(step.forks, parents, strict=True):
            self._slots[fork.child_slot] = parent

    def _is_poisonous(self, step: StepInput) -> bool:
        rows = [self._slots[slot] for slot in step.slots]
        endless = 1 << 30
        return any(
            num_output >= self.fate.poison.get(first_token, endless)
            for first_token, num_output in rows
        )


def mortal_engine(
    config: EngineConfig, fate: Fate, group: MakeGroup = FakeGroup
) -> tuple[LLMEngine, MortalExecutor]:
    """Returns an engine whose ranks are lost as `fate` says."""
    executor = MortalExecutor(config, fate, group)
    return LLMEngine(config, executor, log_stats=False), executor
