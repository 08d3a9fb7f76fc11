"""Graphs are destroyed before the group whose calls they hold: NCCL waits for their end."""

from __future__ import annotations

import pytest
import torch
from support.gpu_walk import record_graphs
from support.models import ModelShop
from support.ranks import OwnPart
from support.workers import loaded_worker
from support.zoo import PLAIN

from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import GraphCaptureError
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.models.llama import LlamaForCausalLM
from tpengine.worker.gpu.graphs import Recorded, Run
from tpengine.worker.worker import Worker

CPU = torch.device("cpu")
SIZES = 4  # 1, 2, 4, 8


class Ledger:
    """Records which graphs are alive and what happened to the group, with the number of graphs that
    were alive at that time."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.recorded = 0
        self.group: list[tuple[str, int]] = []
        self.fails_at: int | None = None
        """Number of the recording that fails; None: no recording fails."""

    def capture(self, run: Run) -> Recorded:
        self.recorded += 1
        number = self.recorded
        if number == self.fails_at:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")
        run()
        self.alive.add(number)

        def replay() -> torch.Tensor:
            assert number in self.alive, "replay of a destroyed graph"
            return run()

        return Recorded(replay, lambda: self.alive.remove(number))


class Group(OwnPart):
    """The first of two ranks; the other one contributes zeros."""

    can_be_recorded = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)

    gather = all_gather
    broadcast = OwnPart.all_reduce

    def abandon(self) -> None:
        self._ledger.group.append(("abandon", len(self._ledger.alive)))

    def close(self) -> None:
        self._ledger.group.append(("close", len(self._ledger.alive)))


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Makes workers record graphs, on the CPU."""
    ledger = Ledger()
    record_graphs(monkeypatch, lambda device: ledger.capture)
    return ledger


def loaded(models: ModelShop, ledger: Ledger, size: int = 2) -> Worker:
    args = {"tensor_parallel_size": size, "executor": "ray" if size > 1 else "local"}
    parallel = ParallelState(0, size, Group(ledger)) if size > 1 else None
    return loaded_worker(models.folder(PLAIN), parallel, max_model_len=64, max_num_seqs=8, **args)


def step(number: int) -> StepInput:
    params = SamplingRules(temperature=0.0)
    new = [] if number > 1 else [NewSequence(0, [5, 6, 7], 3, 0, [0], params, 1, 0, [])]
    return StepInput(number, [0], [1 if number > 1 else 3], new, sample_rows=[0], sample_slots=[0])


def test_shutdown(models: ModelShop, ledger: Ledger) -> None:
    worker = loaded(models, ledger)
    worker.profile_num_available_blocks()
    assert not ledger.alive, "graphs of the estimate were not destroyed"
    for _ in range(2):
        worker.init_cache_engine(6)
        assert len(ledger.alive) == SIZES
    for number in (1, 2, 3):
        worker.execute_model(step(number))
    held = worker._runner.recorded  # type: ignore[union-attr] # as a traceback may
    worker.shutdown()
    assert held is not None
    assert ledger.group == [("close", 0)]
    worker.shutdown()
    assert ledger.group == [("close", 0)] * 2


def test_shutdown_with_a_graph_that_cannot_be_destroyed(models: ModelShop, ledger: Ledger) -> None:
    worker = loaded(models, ledger)
    worker.init_cache_engine(6)
    ledger.alive.clear()
    with pytest.raises(KeyError):
        worker.shutdown()
    assert ledger.group == [("close", 0)]


def test_failed_step(models: ModelShop, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's traceback, whose frames refer to the graph, still exists."""
    worker = loaded(models, ledger)
    worker.init_cache_engine(6)
    worker.execute_model(step(1))
    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", None)
    with pytest.raises(TypeError) as caught:
        worker.execute_model(step(2))
    assert caught.value.__traceback__ is not None
    assert ledger.group == [("abandon", 0)]


def test_a_step_that_fails_on_one_rank_keeps_its_graphs(
    models: ModelShop, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no group to abandon, and the next step may succeed."""
    worker = loaded(models, ledger, size=1)
    worker.init_cache_engine(6)
    worker.execute_model(step(1))
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "compute_logits", None)
        with pytest.raises(TypeError):
            worker.execute_model(step(2))
    assert len(ledger.alive) == SIZES
    worker.execute_model(step(3))
    worker.shutdown()
    assert not ledger.alive


@pytest.mark.parametrize(
    ("method", "args"), [("profile_num_available_blocks", ()), ("init_cache_engine", (6,))]
)
def test_a_recording_that_fails(
    models: ModelShop, ledger: Ledger, method: str, args: tuple[int, ...]
) -> None:
    worker = loaded(models, ledger)
    ledger.fails_at = 2
    with pytest.raises(GraphCaptureError):
        getattr(worker, method)(*args)
    assert ledger.recorded == 2
    assert ledger.group == [("abandon", 0)]
