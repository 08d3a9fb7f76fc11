"""Adapters on ranks in processes of their own, of which one is killed."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
from executor.ray_engines import at_step, executor_of, rank_engine
from support.adapters import NUM_TOKENS, Adapters, assert_peft
from support.engines import greedy, serve

from lora.conftest import EIGHT


@pytest.mark.parametrize(("keep_kv", "is_resumed"), [("safe", True), ("never", False)])
def test_a_rank_is_killed(eight: Adapters, keep_kv: str, is_resumed: bool) -> None:
    """Eight adapters and none share three slots and few blocks, so that most are loaded after the
    loss. Every request ends as in PEFT, and, to the bit, as without the loss."""
    jobs = eight.jobs([None, *EIGHT], [70, 9])
    names, prompts = zip(*jobs, strict=True)
    requests = list(map(eight.request, names))
    args: Any = {"max_loras": 3, "max_lora_rank": 64, "max_num_batched_tokens": 32}
    args |= {"num_device_blocks_override": 24, "max_model_len": 256, "keep_kv": keep_kv}
    with rank_engine(eight.base, 2, enable_lora=True, **args) as engine:
        params = greedy(NUM_TOKENS, logprobs=1)
        undisturbed = serve(engine, prompts, params, requests)
        kill = partial(os.kill, executor_of(engine).places[1].pid, signal.SIGKILL)
        outputs = serve(engine, prompts, params, requests, at_step(30, kill))
        assert [record.is_resumed for record in engine.recoveries] == [is_resumed]
        ledgers = engine.stats().ledgers
        assert all(0 < ledger.adapters_bytes < ledger.weights_bytes for ledger in ledgers)
        assert all(ledger.graphs_bytes > 0 for ledger in ledgers), "decode steps are not recorded"
    assert_peft(eight, jobs, outputs)
    assert [output.outputs for output in outputs] == [output.outputs for output in undisturbed]
