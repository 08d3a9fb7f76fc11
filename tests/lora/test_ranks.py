"""Adapters on ranks in processes of their own, of which one is killed."""

from __future__ import annotations

import os
import signal
from functools import partial

from executor.ray_engines import at_step, executor_of, rank_engine
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
        names, prompts = zip(*jobs, strict=True)
        requests = list(map(eight.request, names))
        kill = partial(os.kill, executor_of(engine).places[1].pid, signal.SIGKILL)
        params, after_step = greedy(NUM_TOKENS), at_step(30, kill)
        outputs = serve(engine, prompts, params, requests, after_step)
        assert engine.health().num_recoveries == 1
        ledgers = engine.stats().ledgers
        assert all(0 < ledger.adapters_bytes < ledger.weights_bytes for ledger in ledgers)
        assert all(ledger.graphs_bytes > 0 for ledger in ledgers), "decode steps are not recorded"
    assert_peft(eight, jobs, outputs)
