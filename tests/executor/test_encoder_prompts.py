"""Models with an encoder, of text or of sound, and such that embed, by ranks in processes: a lost
rank changes no output, embeddings as bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import serve
from support.models import ModelShop
from support.pooling_models import embed_ids
from support.small_barts import encoder_prompts, write_bart
from support.small_whispers import RATE, sounds, write_whisper
from support.zoo import ZOO

from executor.ray_engines import at_step, kill_rank, rank_engine
from tpengine import SamplingParams

TEXTS = encoder_prompts([60, 3, 41, 17, 9, 33, 1, 28], seed=7)
SOUNDS = sounds([16_000, 200, 7_001, 12_000, 3_000], seed=9)
PROMPTS: dict[Callable[[Path], Path], list[Any]] = {
    write_bart: [{"encoder_prompt": {"prompt_token_ids": ids}} for ids in TEXTS],
    write_whisper: [
        {"prompt": None, "multi_modal_data": {"audio": (samples, RATE)}} for samples in SOUNDS
    ],
}
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True, seed=1, n=2, top_p=0.9),
    SamplingParams(max_tokens=30, n=2, use_beam_search=True, temperature=0.0),
]


@pytest.mark.parametrize(
    ("write", "mode", "num_blocks"),
    [(write_bart, "swap", 40), (write_bart, "recompute", 40), (write_whisper, "recompute", 30)],
)
def test_a_lost_rank(
    tmp_path: Path, write: Callable[[Path], Path], mode: str, num_blocks: int
) -> None:
    """Requests of several sequences, in a cache for some of them; with two steps in flight."""
    options = {"num_device_blocks_override": num_blocks, "preemption_mode": mode}
    prompts = PROMPTS[write]
    params = [PARAMS[number % 2] for number in range(len(prompts))]
    with rank_engine(write(tmp_path), 2, block_size=8, **options) as engine:
        answers = []
        for after_step in (lambda: None, at_step(12, lambda: kill_rank(engine, -1))):
            outputs = serve(engine, prompts, params, after_step=after_step)
            assert [output.error for output in outputs] == [None] * len(prompts)
            answers.append([[o.token_ids for o in output.outputs] for output in outputs])
        assert engine.stats().num_preemptions > 0
        assert answers[0] == answers[1]
        assert [record.loss.rank for record in engine.recoveries] == [1]


NUMBERS = [list(range(3 + number, 93 + number)) for number in range(12)]


@pytest.mark.parametrize(("tp_size", "num_stages", "pooling"), [(2, 1, "mean"), (1, 2, "last")])
def test_a_lost_rank_of_an_embedder(
    models: ModelShop, tp_size: int, num_stages: int, pooling: str
) -> None:
    """Prompts are in parts: the sums of the lost ranks are computed again."""
    folder = models.folder(ZOO["d256-2to1-3-layers"])
    options = {"task": "embed", "pooling_type": pooling, "pipeline_parallel_size": num_stages}
    options |= {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with rank_engine(folder, tp_size, **options) as engine:
        expected = embed_ids(engine, NUMBERS)
        after_loss = embed_ids(engine, NUMBERS, lambda: kill_rank(engine, -1))
        assert torch.equal(after_loss, expected)
        assert [record.loss.rank for record in engine.recoveries] == [1]
