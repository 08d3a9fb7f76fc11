"""Models with an encoder and a decoder, of text and of sound, by ranks in processes: a lost rank
changes no output."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.engines import serve
from support.small_barts import encoder_prompts, write_bart
from support.small_whispers import RATE, sounds, write_whisper

from executor.ray_engines import executor_of, rank_engine
from tpengine import LLMEngine, SamplingParams

TEXTS: list[Any] = [
    {"encoder_prompt": {"prompt_token_ids": ids}}
    for ids in encoder_prompts([60, 3, 41, 17, 9, 33, 1, 28], seed=7)
]
SOUNDS: list[Any] = [
    {"prompt": None, "multi_modal_data": {"audio": (samples, RATE)}}
    for samples in sounds([16_000, 200, 7_001, 12_000, 3_000], seed=9)
]
SAMPLED = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, n=2, top_p=0.9)
BEAMS = SamplingParams(max_tokens=30, n=2, use_beam_search=True, temperature=0.0)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0)
BART, WHISPER = (write_bart, TEXTS, BEAMS, 40), (write_whisper, SOUNDS, GREEDY, 30)
"""How it is written, prompts, parameters of every other one, and blocks of the cache."""


def answer(
    engine: LLMEngine, prompts: list[Any], second: SamplingParams, kill: Any = None
) -> list[list[tuple[int, ...]]]:
    """The output ids of each request, every other one with `second`; `kill` is called after some
    steps."""
    steps = itertools.count(1)
    params = [second if number % 2 else SAMPLED for number in range(len(prompts))]
    outputs = serve(engine, prompts, params, None, lambda: kill and next(steps) == 12 and kill())
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("model", "mode"), [(BART, "swap"), (BART, "recompute"), (WHISPER, "recompute")]
)
def test_a_lost_rank(tmp_path: Path, model: Any, mode: str) -> None:
    """Requests of several sequences, in a cache for some of them; with two steps in flight."""
    write, prompts, second, num_blocks = model
    options = {"num_device_blocks_override": num_blocks, "preemption_mode": mode}
    with rank_engine(write(tmp_path), 2, block_size=8, **options) as engine:
        expected = answer(engine, prompts, second)
        assert engine.stats().num_preemptions > 0
        pid = executor_of(engine).places[-1].pid
        assert answer(engine, prompts, second, lambda: os.kill(pid, signal.SIGKILL)) == expected
        assert [record.loss.rank for record in engine.recoveries] == [1]
