"""Models with an encoder and a decoder by ranks in processes: a lost rank changes no output."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.small_barts import encoder_prompts, write_bart

from executor.ray_engines import executor_of, rank_engine
from tpengine import LLMEngine, RequestOutput, SamplingParams

PROMPTS = encoder_prompts([60, 3, 41, 17, 9, 33, 1, 28], seed=7)
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True, seed=1, n=2, top_p=0.9),
    SamplingParams(max_tokens=30, n=2, use_beam_search=True, temperature=0.0),
]


def serve(engine: LLMEngine, kill: Any = None) -> list[list[tuple[int, ...]]]:
    """The output ids of each request; `kill` is called after some steps."""
    last: dict[str, RequestOutput] = {}
    for number, token_ids in enumerate(PROMPTS):
        prompt: Any = {"encoder_prompt": {"prompt_token_ids": token_ids}}
        engine.add_request(str(number), prompt, PARAMS[number % 2])
    num_steps = 0
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        if kill is not None and num_steps == 12:
            kill()
    assert engine.num_free_blocks == engine.num_total_blocks
    outputs = [last[str(number)] for number in range(len(PROMPTS))]
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_lost_rank(tmp_path: Path, mode: str) -> None:
    """Requests of several sequences, in a cache for some of them; with two steps in flight."""
    options = {"block_size": 8, "num_device_blocks_override": 40, "preemption_mode": mode}
    with rank_engine(write_bart(tmp_path), 2, **options) as engine:
        expected = serve(engine)
        assert engine.stats().num_preemptions > 0
        places = executor_of(engine).places
        assert serve(engine, lambda: os.kill(places[-1].pid, signal.SIGKILL)) == expected
        assert [record.loss.rank for record in engine.recoveries] == [1]
