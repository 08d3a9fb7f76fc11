"""Adapters on ranks in processes of their own, of which one is killed."""

from __future__ import annotations

import itertools
import os
import signal

from executor.ray_engines import executor_of, rank_engine
from support.adapters import NUM_TOKENS, Adapters, assert_peft
from support.engines import greedy, serve

from lora.conftest import EIGHT


def test_a_rank_is_killed(eight: Adapters) -> None:
    """Eight adapters and none share three slots and few blocks; the next group gets the adapters
    that the lost one had, and every request ends as in PEFT."""
    jobs = eight.jobs([None, *EIGHT], [70, 9])
    args = {"max_loras": 3, "max_lora_rank": 64, "max_num_batched_tokens": 32}
    with rank_engine(
        eight.base, 2, enable_lora=True, num_device_blocks_override=24, max_model_len=256, **args
    ) as engine:
        num_steps = itertools.count(1)

        def kill_a_rank() -> None:
            if next(num_steps) == 30:
                os.kill(executor_of(engine).places[1].pid, signal.SIGKILL)

        names, prompts = zip(*jobs, strict=True)
        requests = list(map(eight.request, names))
        outputs = serve(engine, prompts, greedy(NUM_TOKENS), requests, after_step=kill_a_rank)
        assert engine.health().num_recoveries == 1
        ledgers = engine.stats().ledgers
        assert all(0 < ledger.adapters_bytes < ledger.weights_bytes for ledger in ledgers)
        assert all(ledger.graphs_bytes > 0 for ledger in ledgers), "decode steps are not recorded"
    assert_peft(eight, jobs, outputs)
