"""A wait for a device that does not answer ends with an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import logits_processors
from support.models import ModelShop
from support.workers import loaded_worker
from support.zoo import PLAIN

from tpengine.distributed.parallel_state import ParallelState
from tpengine.errors import CollectiveError, EngineError
from tpengine.messages import NewSequence, SamplingRules, StepInput
from tpengine.worker import model_runner
from tpengine.worker.transfers import Downloads, Uploads

CPU = torch.device("cpu")


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> ParallelState:
    """The first of two ranks. Its device is the CPU, but its work never ends."""
    empty, never = torch.empty, Mock()
    never.query.return_value = False
    never.synchronize.side_effect = AssertionError("a wait without a bound")

    def ordinary(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", ordinary)
    monkeypatch.setattr(torch.cuda, "Event", Mock(return_value=never))
    return ParallelState(0, 2, timeout_s=0.05)


def test_uploads(hung: ParallelState) -> None:
    """Each has a buffer of its own: a later one does not overwrite it."""
    uploads = Uploads(torch.device("cuda"))
    uploads.device = CPU
    sent = [uploads.send([np.array([number])])[0] for number in range(100)]
    assert [int(number) for number in sent] == list(range(100))


def test_whether_all_can(hung: ParallelState, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "tensor", lambda values, device: torch.zeros(1))
    monkeypatch.setattr(ParallelState, "all_reduce", lambda self, x: x)
    with pytest.raises(CollectiveError, match="has not finished an exchange with all ranks"):
        hung.all_can(True, cuda)


def test_functions_of_users(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may read their logits, so they are called only when the logits are computed."""
    worker = loaded_worker(models.folder(PLAIN), ParallelState(timeout_s=0.05))
    worker.init_cache_engine(6)
    monkeypatch.setattr(model_runner, "end_of_work", lambda device: lambda: False)
    params = SamplingRules(logits_processors=["support.logits_processors:keep"])
    new = NewSequence(0, [5, 6, 7], 3, 0, [0], params, 1, 0, [])
    logits_processors.kept.clear()
    with pytest.raises(EngineError, match=r"has not finished a step within 0\.05 s"):
        worker.execute_model(StepInput(1, [0], [3], [new], sample_rows=[0], sample_slots=[0]))
    assert not logits_processors.kept
    worker.shutdown()


def test_no_arrays_need_no_wait(hung: ParallelState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    downloads = Downloads(torch.device("cuda"), hung.wait_for)
    assert downloads.start([])() == []
