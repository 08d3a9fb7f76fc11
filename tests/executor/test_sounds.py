"""Models that read sound by ranks in processes: a lost rank changes no output."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from support.small_whispers import RATE, sounds, write_whisper

from executor.ray_engines import executor_of, rank_engine
from tpengine import LLMEngine, RequestOutput, SamplingParams

SOUNDS = sounds([16_000, 200, 7_001, 12_000, 3_000], seed=9)
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True, seed=1, n=2, top_p=0.9),
    SamplingParams(max_tokens=30, temperature=0.0),
]


def serve(engine: LLMEngine, kill: Any = None) -> list[list[tuple[int, ...]]]:
    """The output ids of each request; `kill` is called after some steps."""
    last: dict[str, RequestOutput] = {}
    for number, samples in enumerate(SOUNDS):
        prompt: Any = {"prompt": None, "multi_modal_data": {"audio": (samples, RATE)}}
        engine.add_request(str(number), prompt, PARAMS[number % 2])
    num_steps = 0
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        if kill is not None and num_steps == 12:
            kill()
    assert engine.num_free_blocks == engine.num_total_blocks
    outputs = [last[str(number)] for number in range(len(SOUNDS))]
    assert [output.error for output in outputs] == [None] * len(SOUNDS)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_a_lost_rank(tmp_path: Path) -> None:
    """In a cache for some of the requests, which are computed again."""
    options = {"block_size": 8, "num_device_blocks_override": 30, "preemption_mode": "recompute"}
    with rank_engine(write_whisper(tmp_path), 2, **options) as engine:
        expected = serve(engine)
        assert engine.stats().num_preemptions > 0
        places = executor_of(engine).places
        assert serve(engine, lambda: os.kill(places[-1].pid, signal.SIGKILL)) == expected
        assert [record.loss.rank for record in engine.recoveries] == [1]
