"""Adapters on ranks in processes of their own, of which one is killed."""

from __future__ import annotations

import os
import signal

import pytest
from executor.ray_engines import executor_of, ray_engine
from support.adapters import Adapters, assert_as_peft
from support.engines import greedy

from lora.conftest import EIGHT
from tpengine import RequestOutput


@pytest.mark.timeout(300)
def test_a_rank_is_killed(ray_address: str, eight: Adapters) -> None:
    """Eight adapters and none share three slots and few blocks; the next group gets the adapters
    that the lost one had, and every request ends as in PEFT."""
    jobs = eight.jobs([None, *EIGHT], [70, 9])
    args = {"max_loras": 3, "max_lora_rank": 64, "max_num_batched_tokens": 32}
    with ray_engine(
        eight.base, 2, enable_lora=True, num_device_blocks_override=24, max_model_len=256, **args
    ) as engine:
        for number, (name, prompt) in enumerate(jobs):
            engine.add_request(
                str(number),
                None,
                greedy(64),
                lora_request=eight.request(name),
                prompt_token_ids=prompt,
            )
        done: dict[str, RequestOutput] = {}
        num_steps = 0
        while engine.has_unfinished_requests():
            done.update({one.request_id: one for one in engine.step() if one.finished})
            num_steps += 1
            if num_steps == 30:
                group = executor_of(engine)._group
                assert group is not None
                os.kill(group.places[1].pid, signal.SIGKILL)
        assert engine.health().num_recoveries == 1
        ledgers = engine.stats().ledgers
        assert all(0 < one.adapters_bytes < one.weights_bytes for one in ledgers)
    outputs = [done[str(number)] for number in range(len(jobs))]
    assert_as_peft(eight, jobs, outputs)
