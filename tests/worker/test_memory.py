"""How much memory the KV cache may take, and how its size is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import ModelShop
from support.patches import on_call
from support.resident import resident_bytes
from support.zoo import PLAIN

from tpengine.engine_args import EngineArgs
from tpengine.errors import CacheSizeError
from tpengine.worker import cache_engine, device, model_runner
from tpengine.worker.cache_engine import CacheEngine, CacheShape
from tpengine.worker.device import KV_SHARE, SWAP_SHARE, set_num_threads
from tpengine.worker.worker import Worker

GIB = 1 << 30
CPU = torch.device("cpu")
MEMINFO = ("MemTotal", "MemAvailable")


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        (100 * GIB, None, 4 * GIB),
        (5 * GIB, None, 2 * GIB),
        (5 * GIB, 3 * GIB, 3 * GIB),
        (-1, None, 0),
    ],
    ids=["plenty", "forty per cent", "as requested", "overdrawn"],
)
def test_budget_on_cpu(
    monkeypatch: pytest.MonkeyPatch, free: int, wanted: int | None, expected: int
) -> None:
    monkeypatch.setattr(device, "cpu_free_bytes", lambda: free)
    assert device.host_budget_bytes(wanted, KV_SHARE) == expected


@pytest.mark.parametrize(("free", "kv", "swap"), [(100, 4, 4), (5, 2, 0.5)])
def test_ranks_of_a_machine_divide_the_defaults(
    monkeypatch: pytest.MonkeyPatch, free: float, kv: float, swap: float
) -> None:
    monkeypatch.setattr(device, "cpu_free_bytes", lambda: free * GIB)
    for ranks in (1, 2, 4):
        assert device.host_budget_bytes(None, KV_SHARE, ranks) == int(kv * GIB) // ranks
        assert device.host_budget_bytes(None, SWAP_SHARE, ranks) == int(swap * GIB) // ranks
        assert device.host_budget_bytes(GIB, KV_SHARE, ranks) == GIB, "a requested size is per rank"
        assert device.host_budget_bytes(0, SWAP_SHARE, ranks) == 0


def test_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is neither free nor held by this process."""
    monkeypatch.setattr(device, "cpu_total_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(device, "cpu_free_bytes", lambda: 900 * GIB)
    before = device.held_by_others_bytes(CPU)
    mine = torch.ones(GIB // 16, dtype=torch.float32)
    grown = before - device.held_by_others_bytes(CPU)
    assert 80 * GIB < before < 100 * GIB  # this process may have run many tests before
    assert grown == pytest.approx(mine.nbytes, rel=0.05)


def test_free_and_total_are_plausible() -> None:
    assert 0 < device.cpu_free_bytes() < device.cpu_total_bytes()


@pytest.mark.parametrize(
    ("line", "files"),
    [
        (
            "0::/app/inner",
            {
                "app/memory.max": 3 * GIB,
                "app/memory.current": 2 * GIB,
                "app/memory.stat": f"anon {GIB}\nactive_file {GIB // 4}\n"
                f"inactive_file {3 * GIB // 4}\nfile_dirty 7",
            },
        ),
        (
            "9:memory:/app",
            {
                "memory/app/memory.limit_in_bytes": 3 * GIB,
                "memory/app/memory.usage_in_bytes": 2 * GIB,
                "memory/app/memory.stat": f"active_file 5\ninactive_file 5\n"
                f"total_active_file {GIB}\ntotal_inactive_file 0",
            },
        ),
        ("0::/app", {"app/memory.max": 3 * GIB, "app/memory.current": GIB}),
    ],
    ids=["cgroup v2, limit of a parent", "cgroup v1", "no memory.stat"],
)
def test_a_cgroups_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, files: dict[str, int | str]
) -> None:
    """Pages that only cache files, one GiB in each case, do not count as used."""
    (tmp_path / "meminfo").write_text("".join(f"{key}: {50 << 20} kB\n" for key in MEMINFO))
    pretend_cgroups(monkeypatch, tmp_path, line, files)
    assert device.cpu_total_bytes() == 3 * GIB
    assert device.cpu_free_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/app/inner", {"app/inner/cpu.max": "250000 100000", "app/cpu.max": "max 100000"}, 3),
        ("0::/app/inner", {"app/inner/cpu.max": "max 100000", "app/cpu.max": "150000 100000"}, 2),
        ("0::/app", {"app/cpu.max": "max 100000"}, 8),
        ("0::/app", {"app/cpu.max": "1000 100000"}, 1),
        ("0::/app", {"app/cpu.max": "1600000 100000"}, 8),
        (
            "4:cpu,cpuacct:/app",
            {"cpu/app/cpu.cfs_quota_us": 400000, "cpu/app/cpu.cfs_period_us": 100000},
            4,
        ),
        (
            "4:cpu,cpuacct:/app",
            {"cpu/app/cpu.cfs_quota_us": -1, "cpu/app/cpu.cfs_period_us": 100000},
            8,
        ),
    ],
    ids=["v2", "v2, parent", "v2, none", "v2, little", "v2, more than cores", "v1", "v1, none"],
)
def test_threads_by_quota(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    line: str,
    files: dict[str, int | str],
    expected: int,
) -> None:
    pretend_cgroups(monkeypatch, tmp_path, line, files)
    pretend_threads(monkeypatch)
    assert set_num_threads(1) == expected
    assert set_num_threads(2) == max(1, expected // 2)


def test_threads_by_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tpengine's variable comes first, then OpenMP's; quota and ranks do not change them."""
    pretend_cgroups(monkeypatch, tmp_path, "0::/app", {"app/cpu.max": "200000 100000"})
    pretend_threads(monkeypatch)
    for value, expected in {"5": 5, "6,2": 6, "many": 1, "0": 1, "": 1}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert set_num_threads(2) == expected, value
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("TPENGINE_NUM_THREADS", "7")
    assert set_num_threads(2) == 7


def pretend_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends eight cores and an environment without thread counts; changes no thread count."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TPENGINE_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def pretend_cgroups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, files: dict[str, int | str]
) -> None:
    """Pretends that this process is in the cgroup of `line`, and that only these files exist, and
    those of /proc that the test has written."""
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "cgroup").write_text(line + "\n")
    real, moves = Path, {"/proc/self": tmp_path, "/proc": tmp_path, "/sys/fs/cgroup": tmp_path}

    def moved(path: str | Path) -> Path:
        for folder, target in moves.items():
            if str(path).startswith(folder):
                return target / real(path).relative_to(folder)
        return real(path)

    monkeypatch.setattr(device, "Path", moved)


def test_peak_memory_counts_what_was_freed_again() -> None:
    size = 200 << 20
    with device.PeakMemory(CPU) as peak:
        torch.ones(size, dtype=torch.uint8)
    assert peak.peak_bytes > 0.9 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_block_bytes_are_what_is_allocated(dtype: torch.dtype) -> None:
    shape = CacheShape(CPU, dtype, 16, num_layers=3, num_kv_heads=2, head_dim=80)
    sizes = [k.nbytes + v.nbytes for k, v in CacheEngine(shape, 6).kv_caches]
    assert len(sizes) == 3
    assert sum(sizes) == 6 * shape.block_bytes
    assert sum(sizes) == 6 * 16 * 3 * 2 * 2 * (84 if dtype == torch.int8 else 80 * dtype.itemsize)


def test_the_first_blocks_have_their_memory_from_the_start(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the limit of a rank; nothing if the memory is overdrawn."""
    monkeypatch.setattr(cache_engine, "_POPULATE_S", 30.0)
    calls = on_call(monkeypatch, CacheEngine, "populate")
    args = EngineArgs(str(models.folder(PLAIN)), dtype="float32", device="cpu")
    for free, num_ranks, wanted in ((GIB, 1, 64 << 20), (GIB, 2, 32 << 20), (-GIB, 1, 0)):
        monkeypatch.setattr(device, "cpu_free_bytes", lambda free=free: free)
        assert device.populate_bytes(num_ranks) == wanted
        worker = Worker(args.create_engine_config("cpu"))
        worker._num_local_ranks = num_ranks
        worker.init_device()
        worker.load_model()
        worker.init_cache_engine(8192)
        worker.populate_cache()
        cache, _ = calls.pop()
        tensors = [x for pair in cache.kv_caches for x in pair]
        each = wanted // len(tensors)
        assert each < tensors[0].nbytes
        counts = [resident_bytes(x[: each // x[0].nbytes]) for x in tensors]
        if wanted and not any(counts):
            pytest.skip("this kernel populates no memory when asked")
        assert all(count >= each * 9 // 10 for count in counts), (wanted, counts)
        assert sum(map(resident_bytes, tensors)) <= wanted + (len(tensors) * 4 << 20)


@pytest.mark.parametrize(("max_logprobs", "expected"), [(20, 20), (-1, PLAIN.vocab_size)])
def test_ledger(
    models: ModelShop, monkeypatch: pytest.MonkeyPatch, max_logprobs: int, expected: int
) -> None:
    sizes = {"cpu_kv_cache_space": 0.01, "max_num_seqs": 8, "logprobs_mode": "processed_logprobs"}
    args = EngineArgs(str(models.folder(PLAIN)), dtype="float32", **sizes)
    config = args.create_engine_config("cpu")
    worker = Worker(replace(config, model=replace(config.model, max_logprobs=max_logprobs)))
    assert "float32" in worker.init_device()
    worker.load_model()
    sampled = on_call(monkeypatch, model_runner.sampler, "sample")
    ledger = worker.profile_num_available_blocks()
    assert sampled
    for _, batch in sampled:  # the worst step reports as many log probabilities as may be wanted
        assert batch.processed
        assert (batch.num_logprobs == expected).all()
    assert ledger.kv_budget_bytes == int(0.01 * GIB)
    assert ledger.num_device_blocks == ledger.kv_budget_bytes // ledger.block_bytes
    model = models.oracle(models.folder(PLAIN)).model
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert parameters <= ledger.weights_bytes < 1.25 * parameters  # a tied head may be packed twice
    with pytest.raises(CacheSizeError, match=r"cannot be allocated.*choose fewer"):
        worker.init_cache_engine(1 << 36)
    worker.init_cache_engine(ledger.num_device_blocks)
    worker.shutdown()
    worker.shutdown()
