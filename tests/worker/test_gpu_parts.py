"""Parts of the worker that only a GPU needs, tested without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.gpu_walk import record_graphs
from support.messages import said
from support.models import ModelShop
from support.workers import loaded_worker
from support.zoo import PLAIN

from tpengine.engine.startup import memory_table, start_workers
from tpengine.engine_args import EngineArgs
from tpengine.errors import CacheSizeError, ConfigError, GraphCaptureError
from tpengine.messages import BlockMoves, MemoryLedger
from tpengine.worker import device
from tpengine.worker.gpu import graphs as cuda_graph
from tpengine.worker.gpu.graphs import Capture, DecodeGraphs, Recorded, Run, graph_sizes
from tpengine.worker.gpu.pooled_blocks import PooledBlocks, staged_blocks
from tpengine.worker.model_runner import ModelRunner
from tpengine.worker.transfers import layout, pack, unpack
from tpengine.worker.worker import Worker

GIB = 1 << 30
CPU = torch.device("cpu")


def test_arrays_are_packed_into_one_buffer() -> None:
    arrays: list[Any] = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 5), np.int32),
        np.array([[1.5], [2.5]], np.float64),
        np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
        np.array([True]),
    ]
    places, size = layout(arrays)
    buffer = np.full(size + 5, 255, np.uint8)
    pack(buffer, arrays, places)
    for array, view in zip(arrays, unpack(torch.from_numpy(buffer), arrays, places), strict=True):
        assert torch.equal(view, torch.from_numpy(array.copy()))
    assert (buffer[size:] == 255).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("staging_bytes", [1, 64 << 20])
@pytest.mark.parametrize("piece_bytes", [1, 7000, 256 << 20])
def test_pooled_blocks_move(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, staging_bytes: int, piece_bytes: int
) -> None:
    monkeypatch.setattr("tpengine.worker.gpu.pooled_blocks._STAGING_BYTES", staging_bytes)
    monkeypatch.setattr("tpengine.worker.gpu.pooled_blocks._PIECE_BYTES", piece_bytes)
    pool = torch.randn(6, 10, 8, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, bits = pool.view(torch.uint8).clone(), pool.view(torch.uint8)
    blocks = PooledBlocks(pool, 5)
    assert len(blocks.caches) == 3
    assert all(k.shape == v.shape == (10, 8, 2, 16) for k, v in blocks.caches)
    blocks.swap(BlockMoves(swap_outs=[(9, 1)]))
    blocks.swap(BlockMoves(swap_outs=[(7, 3), (8, 4), (2, 0)]))
    bits[:, [2, 7, 8, 9]] = 0
    blocks.swap(BlockMoves(swap_ins=[(3, 1), (4, 2), (0, 7), (1, 8)]))
    blocks.copy([(1, 5), (7, 6)])
    assert torch.equal(bits[:, [1, 2, 7, 8, 5, 6]], before[:, [7, 8, 2, 9, 7, 2]])
    untouched = [0, 3, 4]
    assert torch.equal(bits[:, untouched], before[:, untouched])
    assert not bits[:, 9].any()


def test_layers_wait_once_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first layer is taken, in the way in which models take them."""
    waited: list[Any] = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    caches = PooledBlocks(torch.zeros(6, 2, 8, 2, 16), 0).caches
    copies: Any = object()
    caches.event = copies
    for _ in range(2):
        assert all(waited == [copies] for _, _ in zip(range(3), caches, strict=True))


def test_the_hosts_pool_is_as_large_as_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch pins the next power of two of a tensor's bytes."""
    monkeypatch.setattr("tpengine.worker.gpu.pooled_blocks._PIECE_BYTES", 1 << 20)
    pool = torch.empty(6, 2, 16, 3, 40)  # blocks of 45 KiB
    wanted = 33 * pool[:, 0].nbytes * 23
    pieces = PooledBlocks(pool, 33 * 23)._host
    assert sum(piece.nbytes for piece in pieces) == wanted
    assert sum(1 << (piece.nbytes - 1).bit_length() for piece in pieces) < 1.05 * wanted


@pytest.mark.parametrize(
    ("block_bytes", "host_blocks", "expected"), [(2 << 20, 100, 32), (1 << 30, 5, 1), (1, 0, 0)]
)
def test_staging(block_bytes: int, host_blocks: int, expected: int) -> None:
    assert staged_blocks(block_bytes, host_blocks) == expected


@pytest.mark.parametrize(
    ("free", "share", "reserved", "expected"),
    [
        (60, 0.9, 10, 42),  # of 80, of which 8 must stay free
        (40, 0.9, 10, 22),  # another process takes memory
        (79, 0.9, 10, 61),  # and frees it
        (10, 0.9, 10, 0),
        (60, 1.0, 10, 50),
    ],
)
def test_budget_on_a_gpu(free: int, share: float, reserved: int, expected: int) -> None:
    budget = device.cuda_kv_budget_bytes(80 * GIB, free * GIB, share, reserved * GIB)
    assert budget == pytest.approx(expected * GIB, abs=1)


@pytest.mark.parametrize(
    ("max_num_seqs", "first", "count"),
    [(1, [1], 1), (3, [1, 2, 3], 3), (20, [1, 2, 4, 8, 16, 20], 6), (256, [1, 2, 4, 8], 23)],
)
def test_few_sizes(max_num_seqs: int, first: list[int], count: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes[: len(first)] == first
    assert len(sizes) == count
    assert sizes[-1] == max_num_seqs
    assert sizes == sorted(set(sizes))


def graphs(capture: Capture) -> DecodeGraphs:
    """Of 1, 2, 4 and 8 rows."""
    return DecodeGraphs(
        lambda ids, metadata: ids.float().unsqueeze(1), lambda: None, 8, 4, CPU, capture
    )


def capture_into(sizes: list[int]) -> Capture:
    """Replaces CUDA graphs; notes how many rows each of them has."""

    def capture(run: Run) -> Recorded:
        sizes.append(len(run()))
        return Recorded(run, lambda: None)

    return capture


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "8 sequences does not fit.*enforce_eager"),
        (RuntimeError("operation not permitted"), "8 sequences cannot be recorded.*not permitted"),
    ],
)
def test_a_graph_that_cannot_be_recorded(error: Exception, words: str) -> None:
    with pytest.raises(GraphCaptureError, match=words) as caught:
        graphs(Mock(side_effect=error)).record()
    assert caught.value.__cause__ is error


def test_a_fault_of_the_gpu_is_not_the_recordings() -> None:
    """It may be an earlier operation's fault: a run without graphs would not help."""
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    fault.error_code = 700

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graphs(Mock(side_effect=fault)).record()


def test_graphs_are_estimated_by_the_largest_two(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, taken = list[int](), iter([100, 7])
    growth = SimpleNamespace(num_bytes=lambda: next(taken))
    monkeypatch.setattr(cuda_graph, "CudaGrowth", lambda device: growth)
    assert graphs(capture_into(sizes)).estimate_bytes() == 100 + 3 * 7
    assert sizes == [8, 4]


class FakeExecutor:
    """Its device loses memory to another process between measuring and allocating."""

    def __init__(self, allocatable: int) -> None:
        self.allocatable = allocatable
        self.measured = [50, 40, 30, 20]
        self.asked: list[int] = []
        self.error: Exception = CacheSizeError("out of memory")

    def load(self) -> list[str]:
        return ["a GPU"]

    def profile_num_available_blocks(self) -> list[MemoryLedger]:
        return [MemoryLedger(0, "cuda:0", GIB, 1, 1, GIB, 1 << 20, self.measured[len(self.asked)])]

    def init_cache_engine(self, num_blocks: int, num_host_blocks: int) -> None:
        self.asked.append(num_blocks)
        if num_blocks > self.allocatable:
            raise self.error

    def populate_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def config(models: ModelShop, device: str = "cuda", **args: Any) -> Any:
    return EngineArgs(str(models.folder(PLAIN)), max_model_len=64, **args).create_engine_config(
        device
    )


def test_memory_that_another_process_took_meanwhile(models: ModelShop) -> None:
    executor: Any = FakeExecutor(40)
    assert start_workers(config(models), executor)[0].num_device_blocks == 40
    assert executor.asked == [50, 40]
    executor.asked, executor.error = [], GraphCaptureError("does not fit")
    assert start_workers(config(models), executor)[0].num_device_blocks == 40
    with pytest.raises(CacheSizeError):
        start_workers(config(models, tensor_parallel_size=2), FakeExecutor(40))  # type: ignore
    hopeless: Any = FakeExecutor(1)
    with pytest.raises(CacheSizeError):
        start_workers(config(models), hopeless)
    assert hopeless.asked == [50, 40, 30]
    executor: Any = FakeExecutor(40)
    with pytest.raises(CacheSizeError):
        start_workers(config(models, num_device_blocks_override=50), executor)
    assert executor.asked == [50]


def test_ledger_of_a_gpu_for_one_rank(models: ModelShop, caplog: Any) -> None:
    with said(caplog) as lines:
        start_workers(config(models), FakeExecutor(50))  # type: ignore[arg-type]
    assert any("\nrank     total" in line for line in lines)
    ledger = MemoryLedger(
        0, "cuda:0", 80 * GIB, 16 * GIB, 3 * GIB, 40 * GIB, GIB, 40,
        logits_bytes=GIB, graphs_bytes=GIB // 2,
    )  # fmt: skip
    header, row = memory_table([ledger], ["H200"])
    shown = dict(zip(header.replace("KV budget", "budget").split(), row.split(), strict=True))
    assert (shown["activations"], shown["logits"], shown["graphs"]) == ("2.000", "1.000", "0.500")


@pytest.mark.parametrize(
    ("built", "error", "words"),
    [
        (None, None, "is a build without CUDA"),
        ("13.0", None, "sees no GPU: check `nvidia-smi`"),
        (
            "13.0",
            RuntimeError("The NVIDIA driver on your system is too old (found version 12020)."),
            r"driver on your system is too old.*update the driver.*device='cpu'",
        ),
    ],
)
def test_no_gpu_says_why(
    monkeypatch: pytest.MonkeyPatch, built: str | None, error: Exception | None, words: str
) -> None:

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=words):
        device.detect_device("cuda")
    assert device.detect_device("auto") == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rank_without_a_gpu_says_why(models: ModelShop) -> None:
    """Also where the driver's machine has one: each rank looks for itself."""
    with pytest.raises(ConfigError, match=r"device = 'cuda', but torch .*use device='cpu'"):
        Worker(config(models, dtype="bfloat16")).init_device()


def test_fp8_is_for_gpus(models: ModelShop) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'fp8'.*leave it out"):
        config(models, "cpu", kv_cache_dtype="fp8")
    made = config(models, kv_cache_dtype="fp8", attention_backend="sdpa", enforce_eager=True)
    assert device.cache_dtype(made.cache.kv_cache_dtype, torch.bfloat16) == torch.float8_e4m3fn
    assert (made.kernels.attention_backend, made.kernels.enforce_eager) == ("sdpa", True)
    assert device.cache_dtype("auto", torch.bfloat16) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'int8'.*CPUs only.*use fp8"):
        config(models, kv_cache_dtype="int8", attention_backend="sdpa", enforce_eager=True)


def test_a_worker_reserves_its_memory(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger of a GPU, with substitutes for what only a GPU can report."""
    recorded: list[int] = []
    reserved: list[int] = []
    record_graphs(monkeypatch, lambda device: capture_into(recorded), 1000)
    worker = loaded_worker(config(models, "cpu", dtype="float32", max_num_seqs=8, swap_space=0.01))
    attention = worker._gpu
    assert attention.num_bytes == 2 * 4 * 8 * 64 * PLAIN.num_kv_heads * PLAIN.head_dim

    def budget(*args: Any) -> tuple[int, int]:
        reserved.append(args[-1])
        return GIB, 1 << 20

    monkeypatch.setattr(device, "kv_budget_bytes", budget)
    ledger = worker.profile_num_available_blocks()
    assert recorded == [8, 4]
    assert ledger.graphs_bytes == 4 * 1000  # sizes 1, 2, 4, 8
    staging = ledger.num_host_blocks * ledger.block_bytes
    assert 0 < staging <= int(0.01 * GIB)
    peak = ledger.activation_peak_bytes - attention.num_bytes - staging
    assert reserved == [peak + 4000 + staging]
    again = worker.profile_num_available_blocks(ledger.activation_peak_bytes)
    assert again.activation_peak_bytes == ledger.activation_peak_bytes
    assert reserved[1] == reserved[0]
    recorded.clear()
    for num_blocks in (12, 6):  # the second cache replaces the first
        worker.init_cache_engine(num_blocks, 2)
        k_cache, _ = worker._runner.cache_engine.kv_caches[0]
        assert len(k_cache) == num_blocks
    assert recorded == [8, 4, 2, 1] * 2

    full = Mock(side_effect=torch.OutOfMemoryError("another process took it"))

    monkeypatch.setattr(ModelRunner, "run_worst_case", full)
    with pytest.raises(CacheSizeError, match=r"activations of a step.*do not fit.*another process"):
        worker.init_cache_engine(6, 2)
    assert worker._runner is None
    worker.shutdown()
