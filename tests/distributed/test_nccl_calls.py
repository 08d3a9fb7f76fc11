"""The calls of NCCL, checked on a stand-in for torch's group, because tests have no GPU."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import ADDRESS
from tpengine.distributed.collectives import NcclCollectives
from tpengine.distributed.rendezvous import Meeting, make_store
from tpengine.errors import RendezvousError
from tpengine.messages import Rendezvous

CPU = torch.device("cpu")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Answers like torch's group of one, and notes each call."""
    group = Mock()
    group._allgather_base.side_effect = lambda out, x, _: out.copy_(x)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(return_value=group), raising=False)
    return group


@pytest.fixture
def meeting(group: Mock) -> Meeting:
    store = make_store(ADDRESS)
    return Meeting(0, Rendezvous("nccl", 0, [ADDRESS], store.port, 5.0, 5.0), store)


def test_every_call_runs_on_the_current_stream(group: Mock, meeting: Meeting) -> None:
    """torch returns no handle for such calls, so nothing waits for one. Without options a call has
    a stream of its own."""
    nccl = NcclCollectives(meeting, CPU)
    x = torch.arange(6.0).view(2, 3)
    for answer in (nccl.all_reduce(x), nccl.all_gather(x), nccl.gather(x), nccl.broadcast(x)):
        assert torch.equal(answer, x)
    names = ["allreduce", "allreduce", "_allgather_base", "_allgather_base", "broadcast"]
    assert [name for name, *_ in group.method_calls] == names  # the first connects
    assert not any(args[-1].asyncOp for _, args, _ in group.method_calls)


def test_unconnected_group_is_aborted(group: Mock, meeting: Meeting) -> None:
    group.allreduce.side_effect = RuntimeError("a rank is missing")
    with pytest.raises(RendezvousError, match=r"by NCCL.*a rank is missing"):
        NcclCollectives(meeting, CPU)
    group.abort.assert_called_once_with()


def test_a_gpu_fault_is_not_a_lost_peer(group: Mock, meeting: Meeting) -> None:
    """A kernel that failed earlier is reported by the next exchange; no other rank has failed."""
    nccl = NcclCollectives(meeting, CPU)
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    fault.error_code = 700
    group.allreduce.side_effect = fault
    with pytest.raises(torch.AcceleratorError):
        nccl.all_reduce(torch.ones(2))
