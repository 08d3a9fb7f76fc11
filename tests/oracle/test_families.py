"""Greedy ids of every family and variant equal those of transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.foretold import totals
from support.gpu_walk import GpuWalk
from support.oracle import Oracle
from support.step_log import log_steps
from support.subjects import (
    BLOCK_SIZE,
    NUM_TOKENS,
    PROMPT_LENGTHS,
    Subjects,
    assert_equal_to_oracle,
    generate,
)
from support.variants import MAX_POSITIONS, PADDED, VARIANTS, VOCAB_SIZE, WINDOW, Variant

from tpengine.messages import MemoryLedger

JUST_TWO = sum(-(-length // BLOCK_SIZE) for length in PROMPT_LENGTHS[:2])
"""Blocks that hold the longest prompts and nearly nothing of their answers."""
CHUNK = 16
JUST_A_WINDOW = -(-WINDOW // BLOCK_SIZE) + 1 + CHUNK // BLOCK_SIZE
"""The same if every layer has a window."""
ERROR = 3e-3
"""Of a log probability. With AVX2 transformers' float32 is 1.8e-3 from its own float64 where logits
reach 96 (`gemma3_text-ropes`); tpengine's is 0.6e-3 from it."""


def divides(variant: Variant, tp_size: int) -> bool:
    config = variant.config
    heads = config.get("n_head") or config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


MODES = ("whole", "chunked", "gpu", 2, 4)
"""Ways to serve a variant; a number is that of the ranks."""
OF_EVERY_FAMILY = ("whole", "chunked", "gpu", 4)


def variants_of(mode: str | int) -> list[Any]:
    """Variants that a mode can serve, and the mode. `make test` has the first of each family in
    the modes above, and each other one in one of them; the rest is marked soak."""
    cases, families = [], set()
    for place, variant in enumerate(VARIANTS):
        modes = [mode for mode in MODES if isinstance(mode, str) or divides(variant, mode)]
        if mode in modes:
            is_first = variant.model_type not in families and mode in OF_EVERY_FAMILY
            is_kept = is_first or mode == modes[place % len(modes)]
            marks = [] if is_kept else [pytest.mark.soak]
            cases.append(pytest.param(variant, mode, id=f"{variant.name}-{mode}", marks=marks))
            families.add(variant.model_type)
    return cases


def all_windowed(variant: Variant) -> bool:
    return "sliding_window" in variant.ablation


@pytest.mark.soak
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_oracle_could_tell(variant: Variant, subjects: Subjects, tmp_path: Path) -> None:
    """A wrong engine cannot pass: answers vary, and depend on early tokens and on the variant's
    special field."""
    subject = subjects(variant)
    answers = subject.oracle.answers(subject.prompts)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
    # If every layer has a window, the last token does not see a long prompt's early tokens.
    first = PROMPT_LENGTHS.index(19) if all_windowed(variant) else 0
    changed = [[3 + (p[0] + 1) % (VOCAB_SIZE - 3), *p[1:]] for p in subject.prompts[first:3]]
    pairs = zip(subject.oracle.answers(changed), answers[first:3], strict=True)
    assert any(other.token_ids != answer.token_ids for other, answer in pairs)
    if variant.ablation:
        variant.write_ablated(subject.folder, tmp_path / "ablated")
        ablated = Oracle(tmp_path / "ablated", NUM_TOKENS)
        pairs = zip(subject.prompts, answers, strict=True)
        assert any(ablated.answers([p])[0].token_ids != answer.token_ids for p, answer in pairs)


@pytest.mark.parametrize(("variant", "mode"), variants_of("whole"))
def test_whole_prompts(variant: Variant, mode: str, subjects: Subjects) -> None:
    subject = subjects(variant)
    args = {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_POSITIONS}
    ledgers: list[MemoryLedger] = []
    with log_steps() as log:
        outputs = generate(subject, look=lambda e: ledgers.extend(e.stats().ledgers), **args)
    assert ledgers[0].graphs_bytes > 0, "its decode steps are not recorded"
    assert log.num_partial_chunks == 0
    assert log.num_preemptions == 0
    assert log.max_tokens > max(PROMPT_LENGTHS)
    assert_equal_to_oracle(subject, outputs)


@pytest.mark.parametrize(("variant", "mode"), variants_of("chunked"))
def test_chunked_and_preempted(variant: Variant, mode: str, subjects: Subjects) -> None:
    subject = subjects(variant)
    num_blocks = JUST_A_WINDOW if all_windowed(variant) else JUST_TWO
    args = {"max_num_batched_tokens": CHUNK, "num_device_blocks_override": num_blocks}
    with log_steps() as log:
        outputs = generate(subject, **args)
    assert log.max_tokens == CHUNK
    assert log.num_partial_chunks >= max(PROMPT_LENGTHS) // CHUNK
    assert log.num_preemptions > 0
    assert log.num_mixed_steps > 0
    assert_equal_to_oracle(subject, outputs)


@pytest.mark.parametrize(("variant", "tp_size"), [*variants_of(2), *variants_of(4)])
def test_sharded(variant: Variant, tp_size: int, subjects: Subjects) -> None:
    """Every rank samples the same tokens, too (the executor compares them), and accepts the same
    drafts."""
    subject = subjects(variant)
    # Without the longest prompt, which tests nothing about ranks.
    subject = replace(subject, prompts=subject.prompts[1:])
    drafts = list[tuple[int, int]]()
    outputs = generate(
        subject,
        tp_size,
        logprobs=3,
        look=lambda engine: drafts.append(totals(engine._scheduler.drafter)),
        speculative_model="[ngram]",
    )
    assert_equal_to_oracle(subject, outputs)
    assert min(drafts[0]) > 0
    for prompt, output in zip(subject.prompts, outputs, strict=True):
        logprobs = subject.oracle.logits_after(prompt, output.token_ids).log_softmax(dim=-1)
        for expected, entries in zip(logprobs, output.logprobs, strict=True):
            assert len(entries) >= 3
            for token_id, logprob in entries.items():
                assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=ERROR)


RANKS = {"llama": 2, "gpt2": 2, "bloom": 4}
"""By model type, where it is more than one."""


@pytest.mark.parametrize("variant", PADDED, ids=lambda variant: variant.name)
def test_heads_that_the_cache_pads(variant: Variant, subjects: Subjects) -> None:
    """In chunks, with preemption, on ranks."""
    subject = subjects(variant)
    subject = replace(subject, prompts=subject.prompts[1:])
    tight = {"max_model_len": 7 * BLOCK_SIZE, "num_device_blocks_override": 7}
    with log_steps() as log:
        tp_size = RANKS.get(variant.model_type, 1)
        outputs = generate(subject, tp_size, max_num_batched_tokens=BLOCK_SIZE, **tight)
    assert log.num_preemptions > 0
    assert_equal_to_oracle(subject, outputs)


def test_every_family_is_in_every_mode() -> None:
    families = {variant.model_type for variant in VARIANTS}
    for mode in OF_EVERY_FAMILY:
        kept = {row.values[0].model_type for row in variants_of(mode) if not row.marks}
        assert kept == families, mode


@pytest.mark.parametrize(("variant", "mode"), variants_of("gpu"))
def test_on_a_gpus_way(variant: Variant, mode: str, subjects: Subjects, walk: GpuWalk) -> None:
    """Windows, linear biases and learned positions, over gathered context and in padded batches,
    with and without drafts."""
    subject = subjects(variant)
    args = {"max_num_batched_tokens": 3 * CHUNK, "max_num_seqs": 8}
    assert_equal_to_oracle(subject, generate(subject, **args, speculative_model="[ngram]"))
    assert min(walk.gathers, walk.prefills, walk.replays, walk.whole) > 0


def test_ranks_on_a_gpus_way(subjects: Subjects, walk: GpuWalk) -> None:
    """Graphs that contain sums, and steps that begin early. All ranks must do the same, or one of
    them waits for the others in a different exchange."""
    subject = subjects(next(variant for variant in VARIANTS if divides(variant, 2)))
    args = {"max_num_batched_tokens": 3 * CHUNK, "num_device_blocks_override": JUST_TWO + 1}
    assert_equal_to_oracle(subject, generate(subject, 2, max_num_seqs=8, **args))
    assert min(walk.gathers, walk.prefills, walk.replays, walk.whole) > 0
