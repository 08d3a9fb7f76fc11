"""NCCL, and ranks that share one GPU. These tests need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ops.cases import GPU

from distributed.ranks import ADDRESS, Ranks
from distributed.worker_tasks import new_worker, run_alone, run_steps, shut_down, start_worker
from tpengine.config import EngineConfig
from tpengine.distributed.collectives import NcclCollectives
from tpengine.distributed.parallel_state import ParallelState
from tpengine.distributed.rendezvous import Meeting, make_store
from tpengine.messages import Rendezvous, StepOutput
from tpengine.worker.gpu.graphs import CudaCapture, agree_on_graphs
from tpengine.worker.transfers import Downloads

pytestmark = GPU
CUDA = torch.device("cuda", 0)


@pytest.fixture
def nccl() -> Iterator[NcclCollectives]:
    """A group of one rank."""
    store = make_store(ADDRESS)
    rendezvous = Rendezvous("nccl_test", 0, [ADDRESS], store.port, 30.0, 30.0)
    group = NcclCollectives(Meeting(0, rendezvous, store), CUDA)
    yield group
    group.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_world_of_one(nccl: NcclCollectives, dtype: torch.dtype) -> None:
    x = torch.arange(24, device=CUDA).to(dtype).view(4, 6)
    for view in (x, x[:, ::2], x[1:1]):
        for answer in (
            nccl.all_reduce(view.clone()),
            nccl.all_gather(view),
            nccl.gather(view),
            nccl.broadcast(view.clone()),
        ):
            assert torch.equal(answer, view)


def test_a_graph_holds_exchanges(nccl: NcclCollectives) -> None:
    x = torch.zeros(64, 128, device=CUDA, dtype=torch.bfloat16)
    weight = torch.eye(128, device=CUDA, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return nccl.all_gather(nccl.all_reduce(x @ weight) + 1)

    with torch.inference_mode():
        recorded = CudaCapture(CUDA)(run)
        try:  # the graph must be deleted before the group is closed
            downloads = Downloads(CUDA, ParallelState(tp_size=2, collectives=nccl).wait_for)
            for value in (3.0, 5.0):
                x.fill_(value)
                (replayed,) = downloads.start([recorded.replay().float()])()
                assert (replayed == value + 1).all()
        finally:
            recorded.destroy()
    assert agree_on_graphs(ParallelState(0, 1, nccl), CUDA)


@pytest.fixture(scope="module")
def on_a_gpu(config: EngineConfig) -> EngineConfig:
    return replace(config, device="cuda", cache=replace(config.cache, gpu_memory_utilization=0.3))


def answers_of(answers: list[StepOutput]) -> list[list[int]]:
    return [step.token_ids for step in answers]


def test_two_ranks_share_the_card(on_a_gpu: EngineConfig, two: Ranks) -> None:
    """Sharded weights and caches on one GPU; exchanges go through the host."""
    expected = run_alone(on_a_gpu)
    port = two.run(new_worker, on_a_gpu)[0]
    started = two.run(start_worker, Rendezvous("test", 1, [ADDRESS] * 2, port, 60.0, 30.0))
    assert all(how.endswith("by gloo through the host") for how, _ in started)
    for answer in two.run(run_steps):
        assert answers_of(answer) == answers_of(expected)
    two.run(shut_down)
