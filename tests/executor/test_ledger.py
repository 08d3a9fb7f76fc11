"""The table of every rank's memory."""

from __future__ import annotations

from tpengine.engine.startup import memory_table
from tpengine.messages import MemoryLedger

GIB = 1 << 30


def ledger(rank: int, num_blocks: int) -> MemoryLedger:
    return MemoryLedger(
        rank=rank,
        device="cuda:0",
        total_bytes=80 * GIB,
        weights_bytes=7 * GIB,
        activation_peak_bytes=GIB // 2,
        kv_budget_bytes=num_blocks * (GIB // 512),
        block_bytes=GIB // 512,
        num_device_blocks=num_blocks,
    )


def test_limiting_rank_is_named_with_what_it_would_gain() -> None:
    devices = ["big on node 10.0.0.1", "small on node 10.0.0.2", "big on node 10.0.0.3"]
    lines = memory_table([ledger(0, 2048), ledger(1, 1024), ledger(2, 1536)], devices)
    assert len(lines) == 5
    assert lines[2].split() == [
        *("1", "80.000", "7.000", "0.500", "2.000", "1024"),
        *("small", "on", "node", "10.0.0.2"),
    ]
    assert lines[-1] == (
        "rank 1 limits every rank to 1024 blocks (small on node 10.0.0.2); 1.000 GiB more there "
        "would give all 1536"
    )


def test_equal_ranks_do_not_blame_each_other() -> None:
    assert len(memory_table([ledger(0, 512), ledger(1, 512)], ["a", "b"])) == 3
