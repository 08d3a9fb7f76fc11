"""The table of every rank's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.messages import said

from executor.ray_engines import executor_of, rank_engine
from tpengine.distributed.shared_memory import CAPACITY_BYTES
from tpengine.engine.startup import memory_table
from tpengine.messages import MemoryLedger
from tpengine.ops.shared_memory_ops import segment_bytes

GIB = 1 << 30


def ledger(rank: int, num_blocks: int) -> MemoryLedger:
    block = GIB // 512
    blocks = {"kv_budget_bytes": num_blocks * block, "block_bytes": block}
    others = {"communicator_bytes": GIB // 4, "held_by_others_bytes": 3 * GIB}
    sizes = {"total_bytes": 80 * GIB, "weights_bytes": 7 * GIB, "activation_peak_bytes": GIB // 2}
    sizes |= {**blocks, **others, "num_device_blocks": num_blocks}
    return MemoryLedger(rank=rank, device="cuda:0", **sizes)


def test_limiting_rank_is_named_with_what_it_would_gain() -> None:
    devices = ["big on node 10.0.0.1", "small on node 10.0.0.2", "big on node 10.0.0.3"]
    lines = memory_table([ledger(0, 2048), ledger(1, 1024), ledger(2, 1536)], devices)
    assert len(lines) == 5
    memory = "1 80.000 3.000 7.000 0.500 0.250 2.000 1024"
    assert lines[2].split() == f"{memory} small on node 10.0.0.2".split()
    assert lines[-1] == (
        "rank 1 limits every rank to 1024 blocks (small on node 10.0.0.2); 1.000 GiB more there "
        "would give all 1536"
    )


def test_equal_ranks_do_not_blame_each_other() -> None:
    assert len(memory_table([ledger(0, 512), ledger(1, 512)], ["a", "b"])) == 3


def test_poor_rank_lowers_all_and_is_named(folder: Path, caplog: Any) -> None:
    """Real ranks, with a budget for each."""
    budgets = {"cpu_kv_cache_space": [0.02, 0.01], "num_device_blocks_override": None}
    with said(caplog) as lines, rank_engine(folder, 2, **budgets) as engine:
        ledgers = executor_of(engine).profile_num_available_blocks()
        more, less = (ledger.num_device_blocks for ledger in ledgers)
        assert [ledger.kv_budget_bytes for ledger in ledgers] == [int(0.02 * GIB), int(0.01 * GIB)]
        assert engine.num_total_blocks == less > 0
        assert more == pytest.approx(2 * less, abs=1)
        place = executor_of(engine).places[1]
    segment = segment_bytes(2, CAPACITY_BYTES)
    for ledger in ledgers:
        assert ledger.communicator_bytes == segment // 2 > 1 << 20
        # The driver and the other rank hold more.
        assert 256 << 20 < ledger.held_by_others_bytes < ledger.total_bytes
    (whole,) = (line for line in lines if line.startswith("memory of the ranks"))
    table = whole.splitlines()[1:]
    assert len(table) == 4
    assert " ".join(table[0].split()[:6]) == "rank total others weights activations communicator"
    assert f" {less} blocks (" in table[3]
    assert str(place) in table[3]
    assert table[3].endswith(f"0.010 GiB more there would give all {more}")
