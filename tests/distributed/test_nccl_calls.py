"""The calls of NCCL, checked on a stand-in for torch's group, because tests have no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import ADDRESS
from tpengine.distributed.collectives import NcclCollectives
from tpengine.distributed.rendezvous import Meeting, make_store
from tpengine.errors import RendezvousError
from tpengine.messages import Rendezvous

CPU = torch.device("cpu")


class StandIn:
    """Answers like a group of one, and records each call with its asyncOp."""

    class Options:
        """Options of a real group; only the timeout is set."""

    calls: list[tuple[str, bool]]
    error: Exception | None = None

    def __init__(self, *_: object) -> None:
        type(self).calls = []

    def _note(self, name: str, options: Any = None) -> None:
        # A call without options uses the defaults, as in the real group.
        self.calls.append((name, True if options is None else options.asyncOp))
        if self.error is not None:
            raise self.error

    def allreduce(self, _: object, options: Any = None) -> None:
        self._note("allreduce", options)

    def broadcast(self, _: object, options: Any = None) -> None:
        self._note("broadcast", options)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any = None) -> None:
        out.copy_(x)
        self._note("allgather", options)

    def abort(self) -> None:
        self.calls.append(("abort", False))


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    store = make_store(ADDRESS)
    return Meeting(0, Rendezvous("nccl", 0, [ADDRESS], store.port, 5.0, 5.0), store)


def test_every_call_runs_on_the_current_stream(meeting: Meeting) -> None:
    """torch returns no handle for such calls, so nothing waits for one."""
    group = NcclCollectives(meeting, CPU)
    x = torch.arange(6.0).view(2, 3)
    for answer in (group.all_reduce(x), group.all_gather(x), group.gather(x), group.broadcast(x)):
        assert torch.equal(answer, x)
    names = ["allreduce", "allreduce", "allgather", "allgather", "broadcast"]
    assert StandIn.calls == [(name, False) for name in names]  # the first connects


def test_unconnected_group_is_aborted(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "error", RuntimeError("a rank is missing"))
    with pytest.raises(RendezvousError, match=r"by NCCL.*a rank is missing"):
        NcclCollectives(meeting, CPU)
    assert StandIn.calls[-1][0] == "abort"


def test_a_gpu_fault_is_not_a_lost_peer(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that failed earlier is reported by the next exchange; no other rank has failed."""
    group = NcclCollectives(meeting, CPU)
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    fault.error_code = 700
    monkeypatch.setattr(StandIn, "error", fault)
    with pytest.raises(torch.AcceleratorError):
        group.all_reduce(torch.ones(2))
