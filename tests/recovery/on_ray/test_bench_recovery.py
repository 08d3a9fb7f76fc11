"""The benchmark of recoveries measures what it says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.lost_ranks import RecoveryOptions, measure

from tpengine import EngineArgs


@pytest.mark.soak
def test_times_add_up(folder: Path) -> None:
    """The longest gap holds the time until the loss was found and until it was mended."""
    options = RecoveryOptions(kills=2, num_streams=3, input_len=20)
    engine_args = EngineArgs(
        str(folder),
        tensor_parallel_size=2,
        executor="ray",
        device="cpu",
        dtype="float32",
        num_device_blocks_override=256,
        spare_workers=1,
        max_recoveries=2,
        disable_log_stats=True,
    )
    kills = measure(engine_args, options)
    assert [kill.record.epoch for kill in kills] == [2, 3]
    for kill in kills:
        assert kill.record.num_requests == 3
        assert 0 < kill.found_s < kill.gap_s
        assert kill.found_s + kill.record.ready_s < kill.gap_s + 0.5
        assert sum(kill.record.phases_s.values()) <= kill.record.ready_s
        assert kill.recompute_s > 0
        gaps = [later - before for before, later in pairwise(kill.tokens_s)]
        assert kill.record.ready_s < max(gaps) < kill.gap_s + 0.5
