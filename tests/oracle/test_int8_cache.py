"""An int8 KV cache: the same ids however a sequence is computed, and nearly the logits of a cache
in the model's dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.engines import generate, greedy, ids, open_llm, outputs_of
from support.matrix import only
from support.models import ModelShop
from support.step_log import log_steps
from support.subjects import BY_NAME, Subjects
from support.zoo import PLAIN

from tpengine import EngineArgs, RequestOutput, SamplingParams
from tpengine.bench.perplexity import mean_loss
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine.tokenizer import load_tokenizer

INT8 = {"kv_cache_dtype": "int8"}
LENGTHS = (3, 70, 17, 100, 40, 33, 120, 9, 64, 25, 90, 50, 16, 31, 80, 110)
TIGHT = {"max_model_len": 192, "num_device_blocks_override": 36, "max_num_batched_tokens": 64}
WAYS: dict[str, dict[str, Any]] = {
    "blocks of 8, whole prompts": {"block_size": 8, "enable_chunked_prefill": False},
    "blocks of 32, chunks of 16": {"block_size": 32, "max_num_batched_tokens": 16},
    "chunks of 64, recompute": TIGHT | {"preemption_mode": "recompute"},
    "chunks of 64, swap": TIGHT | {"preemption_mode": "swap"},
}


@pytest.fixture(scope="module")
def calm(models: ModelShop) -> tuple[Path, list[list[int]], list[RequestOutput]]:
    """A model, prompts, and their answers when nothing is cut or preempted."""
    folder, _, prompts = models.problem(PLAIN, LENGTHS, seed=3)
    return folder, prompts, outputs_of(folder, prompts, greedy(logprobs=1), **INT8)


@pytest.mark.parametrize("way", only(list(WAYS)[::3], WAYS))
def test_same_ids(calm: tuple[Path, list[list[int]], list[RequestOutput]], way: str) -> None:
    folder, prompts, expected = calm
    with log_steps() as log, open_llm(folder, **INT8, **WAYS[way]) as llm:
        assert ids(generate(llm, prompts, greedy())) == ids(expected)
    if mode := WAYS[way].get("preemption_mode"):
        log.assert_only(mode, at_least=5)


def test_the_cache_rounds(calm: tuple[Path, list[list[int]], list[RequestOutput]]) -> None:
    """Against the cache in float32: a little different, so that the option acts."""
    folder, prompts, rounded = calm
    exact = outputs_of(folder, prompts, greedy(1, logprobs=1))
    pairs = [
        (a.outputs[0].logprobs[0], b.outputs[0].logprobs[0])
        for a, b in zip(rounded, exact, strict=True)
    ]
    gaps = [abs(a[i].logprob - b[i].logprob) for a, b in pairs for i in a.keys() & b.keys()]
    assert len(gaps) >= 12
    assert 1e-6 < sum(gaps) / len(gaps) < 0.1


def answers_of(
    model: Path | str, prompts: Sequence[Sequence[int]], share: bool, **args: Any
) -> list[Any]:
    with open_llm(model, **INT8, enable_prefix_caching=share, **args) as llm:
        first = ids(generate(llm, prompts, greedy(16)))
        again = ids(generate(llm, prompts, greedy(16)))
        hits = llm.llm_engine.stats().cache.prefix_hits
        params = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=12)
        beams = generate(llm, prompts, params)
    assert (hits > 0) == share
    return [first, again, [[o.token_ids for o in output.outputs] for output in beams]]


def test_prefix_cache_and_beams(models: ModelShop) -> None:
    """Blocks that sequences share and copy before they write are copied with their scales."""
    folder = models.folder(PLAIN)
    prompts = models.oracle(folder).prompts((70, 33, 100), seed=4)
    plain = answers_of(folder, prompts, share=False)
    assert plain[0] == plain[1]
    assert answers_of(folder, prompts, share=True, max_num_batched_tokens=16) == plain


@pytest.mark.parametrize("name", ["bloom-8-heads", "gemma2-caps"])
def test_families(subjects: Subjects, name: str) -> None:
    """Linear biases; windows and soft caps."""
    subject = subjects(BY_NAME[name])
    asked = (subject.folder, subject.prompts, greedy(32))
    whole = ids(outputs_of(*asked, **INT8))
    assert ids(outputs_of(*asked, **INT8, max_num_batched_tokens=16)) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_is_within_half_a_percent(dtype: str) -> None:
    text = Path(__file__).read_text(encoding="utf-8")[:3000]

    tokenizer = load_tokenizer(EngineArgs(EMBEDDED_MODEL).create_engine_config("cpu").model)
    windows = [tokenizer.encode(text)[:256]]
    args = EngineArgs(EMBEDDED_MODEL, dtype=dtype, max_model_len=512, cpu_kv_cache_space=0.05)
    exact, _ = mean_loss(args, windows)
    rounded, _ = mean_loss(replace(args, kv_cache_dtype="int8"), windows)
    assert rounded != exact
    assert abs(math.expm1(rounded - exact)) < 0.005


def test_more_blocks_in_same_memory(models: ModelShop) -> None:
    blocks, room = [], {"num_device_blocks_override": None, "cpu_kv_cache_space": 0.01}
    for args in ({}, INT8):
        with open_llm(models.folder(PLAIN), **room, **args) as llm:
            blocks.append(llm.llm_engine.num_total_blocks)
    head_dim = PLAIN.head_dim  # float32 numbers against bytes and a scale
    assert blocks[1] == pytest.approx(blocks[0] * 4 * head_dim / (head_dim + 4), abs=2)
