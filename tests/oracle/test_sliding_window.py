"""A model whose window is much shorter than its texts: blocks are given back and used again."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from support import engines
from support.bare_model import BareModel
from support.gpu_walk import walk_the_gpus_way
from support.matrix import matrix, only
from support.step_log import log_steps
from support.subjects import BY_NAME, Subjects
from support.variants import MAX_POSITIONS, VARIANTS, VOCAB_SIZE, Variant

from tpengine import EngineArgs, RequestOutput, SamplingParams
from tpengine.config import EngineConfig
from tpengine.errors import CacheSizeError
from tpengine.messages import StepInput
from tpengine.worker.gpu.attention_plans import attention_layers
from tpengine.worker.model_runner import ModelRunner

MODEL = BY_NAME["mistral-window"]
BLOCK_SIZE = 8
CHUNK = 32
LEAST = 1 + 3 + CHUNK // BLOCK_SIZE
"""Blocks of a sequence: WINDOW - 1 = 23 tokens lie in three, or in four, and a chunk in four."""
LENGTHS = (1, 8, 3, 5, 300, 70, 19, 130, 40)
"""Short ones first: they grow while a long one is computed, which is then preempted."""
NUM_OUTPUT_TOKENS = 140
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
CASES: dict[str, dict[str, Any]] = {
    "no preemption": {"num_device_blocks_override": 200},
    "recompute": {"preemption_mode": "recompute"},
    "recompute, none cached": {"preemption_mode": "recompute", "enable_prefix_caching": False},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "whole prompts": {
        "num_device_blocks_override": 200,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": MAX_POSITIONS,
    },
    "two ranks, swap": {"preemption_mode": "swap", "swap_space": 0.01, "tp_size": 2},
    "a GPU's way, swap": {"preemption_mode": "swap", "swap_space": 0.01, "max_num_seqs": 8},
}


@pytest.fixture(autouse=True)
def new_blocks_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a sequence that reads a block that was given to another one has NaN in its results."""
    apply = ModelRunner.apply

    def poisoned(runner: ModelRunner, step: StepInput) -> dict[bytes, str]:
        errors = apply(runner, step)
        new = [block for _, block_ids in step.new_block_ids for block in block_ids]
        for sequence in step.new_sequences:
            new += sequence.block_ids[-(-sequence.num_computed_tokens // BLOCK_SIZE) :]
        for cache in (cache for pair in runner.cache_engine.kv_caches for cache in pair):
            cache[new] = float("nan")
        return errors

    monkeypatch.setattr(ModelRunner, "apply", poisoned)


def make_prompts() -> list[list[int]]:
    """Some begin like the longest one."""
    rng = random.Random(5)
    longest = [rng.randrange(3, VOCAB_SIZE) for _ in range(max(LENGTHS))]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    return [*own[:4], longest, *own[5:], longest[:200] + own[2], longest[:64] + own[3]]


def serve(
    folder: Path, prompts: list[list[int]], params: SamplingParams, **args: Any
) -> tuple[list[RequestOutput], int]:
    """The answers to all prompts, and most blocks that were held when a step had ended."""
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, engine.num_total_blocks - engine.num_free_blocks)

    args = {"max_num_batched_tokens": CHUNK, "num_device_blocks_override": 2 * LEAST, **args}
    with engines.open_engine(folder, block_size=BLOCK_SIZE, **args) as engine:
        outputs = engines.serve(engine, prompts, params, after_step=look)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs, most


@pytest.mark.parametrize(
    "variant",
    only([v for v in VARIANTS if "sliding_window" in v.config], VARIANTS),
    ids=lambda variant: variant.name,
)
def test_the_driver_knows_the_window_of_all_layers(variant: Variant, subjects: Subjects) -> None:
    folder = subjects.folder(variant)
    config = EngineArgs(str(folder)).create_engine_config("cpu").model
    windows = {layer.rule.window for layer in attention_layers(BareModel(folder).model)}
    assert config.sliding_window == (windows.pop() if len(windows) == 1 else None)


IN_MAKE_TEST = ("no preemption", "recompute", "two ranks, swap", "a GPU's way, swap")


@pytest.mark.parametrize("case", only(IN_MAKE_TEST, CASES))
def test_long_answers_are_those_of_transformers(
    case: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU's way K and V are gathered from the first token on, and steps begin early."""
    subject, args, prompts = subjects(MODEL), CASES[case], make_prompts()
    walk = walk_the_gpus_way(monkeypatch) if "GPU" in case else None
    with log_steps() as log:
        outputs, most = serve(subject.folder, prompts, GREEDY, **args)
    if "preemption_mode" in args:
        log.assert_only(args["preemption_mode"])
    else:
        assert log.num_preemptions == 0
        assert [o.num_cached_tokens for o in outputs][-2:] == [200, 64]
        assert most <= 4 * len(prompts) + CHUNK // BLOCK_SIZE
    assert walk is None or min(walk.gathers, walk.prefills, walk.replays, walk.whole) > 0
    for prompt, token_ids in zip(prompts, ids := engines.ids(outputs), strict=True):
        assert len(token_ids) == min(NUM_OUTPUT_TOKENS, MAX_POSITIONS - len(prompt))
    subject.oracle.assert_likeliest(prompts, ids)


FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 3, "seed": 7, "temperature": 1.0},
    "beams": {"n": 2, "best_of": 3, "use_beam_search": True, "temperature": 0.0},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
}


@pytest.mark.parametrize(("mode", "kind"), matrix(["recompute", "swap"], list(FIELDS)))
def test_all_else_is_as_if_no_block_were_given_back(
    mode: str, kind: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = subjects.folder(MODEL)
    params = SamplingParams(max_tokens=60, ignore_eos=True, **FIELDS[kind])
    prompts = [prompt for prompt in make_prompts() if len(prompt) < 200]
    tight = {"preemption_mode": mode, "swap_space": 0.01, "num_device_blocks_override": 3 * LEAST}
    with log_steps() as log:
        windowed, _ = serve(folder, prompts, params, **tight)
    assert (log.num_swapped if mode == "swap" else log.num_recomputed) > 0
    monkeypatch.setattr(EngineConfig, "num_kept_tokens", sys.maxsize)
    wanted, most = serve(folder, prompts, params, num_device_blocks_override=600)
    assert most > 10 * LEAST
    for answer, other in zip(windowed, wanted, strict=True):
        assert [o.token_ids for o in answer.outputs] == [o.token_ids for o in other.outputs]
        if params.prompt_logprobs is None:
            continue
        for entries, expected in zip(answer.prompt_logprobs, other.prompt_logprobs, strict=True):
            if expected is not None:
                assert entries.keys() == expected.keys()
                for token_id, logprob in expected.items():
                    assert entries[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def test_the_cache_must_hold_a_window_and_a_step(subjects: Subjects) -> None:
    folder, prompts = subjects.folder(MODEL), make_prompts()[4:6]
    with pytest.raises(CacheSizeError, match=f"num_device_blocks_override to {LEAST}$"):
        serve(folder, prompts, GREEDY, num_device_blocks_override=LEAST - 1)
    _, most = serve(folder, prompts, GREEDY, num_device_blocks_override=LEAST)
    assert most < LEAST
