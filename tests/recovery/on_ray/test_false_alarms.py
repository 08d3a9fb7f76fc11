"""A busy machine is no lost rank.

`TPENGINE_TEST_FALSE_ALARMS_S` is the duration in seconds; default: ten minutes.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import ExitStack

import pytest
from executor.ray_engines import ray_engine
from support.programs import running

from tpengine import RequestOutputKind, SamplingParams
from tpengine.bench.harness import shape_folder

DURATION_S = float(os.environ.get("TPENGINE_TEST_FALSE_ALARMS_S", "600"))
NUM_PREFILL, NUM_IN_FLIGHT, NUM_BUSY = 2048, 8, 2
BUSY = "while True: sum(range(10_000))"


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 300)
def test_a_saturated_engine_on_a_loaded_machine(ray_address: str) -> None:
    rng = random.Random(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
    )
    args = {"load_format": "dummy", "max_num_batched_tokens": NUM_PREFILL}
    args |= {"num_device_blocks_override": 1200, "swap_space": 0.0}
    with shape_folder("llama-124m") as folder, ray_engine(folder, 2, **args) as engine:
        num_started = num_finished = num_full = 0
        with ExitStack() as busy:
            for _ in range(NUM_BUSY):
                busy.enter_context(running(sys.executable, "-c", BUSY))
            deadline = time.monotonic() + DURATION_S
            while time.monotonic() < deadline:
                while engine.get_num_unfinished_requests() < NUM_IN_FLIGHT:
                    prompt = [rng.randrange(5, 32000) for _ in range(NUM_PREFILL - 16)]
                    engine.add_request(str(num_started), None, params, prompt_token_ids=prompt)
                    num_started += 1
                num_finished += sum(output.finished for output in engine.step())
                stats = engine.last_step
                num_full += stats is not None and stats.num_prefill_tokens > NUM_PREFILL * 3 // 4
        assert num_full > 0
        assert engine.health().num_recoveries == 0
        assert engine.health().epoch == 1
        print(f"\n{num_finished} requests, {num_full} steps of about {NUM_PREFILL} tokens")
