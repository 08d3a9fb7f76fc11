"""Greedy ids of every family and variant equal those of transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.gpu_walk import walk_the_gpus_way
from support.oracle import Oracle
from support.step_log import log_steps
from support.subjects import (
    BLOCK_SIZE,
    LONGEST,
    PROMPT_LENGTHS,
    Subjects,
    assert_equal_to_oracle,
    generate,
)
from support.variants import MAX_POSITIONS, VARIANTS, VOCAB_SIZE, WINDOW, Variant

JUST_ONE = -(-LONGEST // BLOCK_SIZE) + 1
"""Blocks that hold the longest sequence and only a few more tokens."""
CHUNK = 16
JUST_A_WINDOW = -(-WINDOW // BLOCK_SIZE) + 1 + CHUNK // BLOCK_SIZE
"""The same if every layer has a window."""

all_variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def all_windowed(variant: Variant) -> bool:
    return "sliding_window" in variant.ablation


@all_variants
def test_oracle_could_tell(variant: Variant, subjects: Subjects, tmp_path: Path) -> None:
    """A wrong engine cannot pass: answers vary, and depend on early tokens and on the variant's
    special field."""
    subject = subjects(variant)
    answers = subject.oracle.answers(subject.prompts)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
    # If every layer has a window, the last token does not see a long prompt's early tokens.
    early = PROMPT_LENGTHS.index(19) if all_windowed(variant) else 0
    changed = list(subject.prompts[early])
    changed[0] = 3 + (changed[0] + 1) % (VOCAB_SIZE - 3)
    assert subject.oracle.answers([changed])[0].token_ids != answers[early].token_ids
    if variant.ablation:
        variant.write_ablated(subject.folder, tmp_path / "ablated")
        ablated = Oracle(tmp_path / "ablated").answers([subject.prompts[0]])[0]
        assert ablated.token_ids != answers[0].token_ids


@all_variants
def test_whole_prompts(variant: Variant, subjects: Subjects) -> None:
    subject = subjects(variant)
    with log_steps() as log:
        outputs = generate(
            subject, enable_chunked_prefill=False, max_num_batched_tokens=MAX_POSITIONS
        )
    assert log.num_partial_chunks == 0
    assert log.num_preemptions == 0
    assert log.max_tokens > max(PROMPT_LENGTHS)
    assert_equal_to_oracle(subject, outputs)


@all_variants
def test_chunked_and_preempted(variant: Variant, subjects: Subjects) -> None:
    subject = subjects(variant)
    with log_steps() as log:
        outputs = generate(
            subject,
            max_num_batched_tokens=CHUNK,
            num_device_blocks_override=JUST_A_WINDOW if all_windowed(variant) else JUST_ONE,
        )
    assert log.max_tokens == CHUNK
    assert log.num_partial_chunks >= max(PROMPT_LENGTHS) // CHUNK
    assert log.num_preemptions > 0
    assert log.num_mixed_steps > 0
    assert_equal_to_oracle(subject, outputs)


def _divides(variant: Variant, tp_size: int) -> bool:
    config = variant.config
    heads = config.get("n_head") or config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


SHARDED = [(v, tp) for tp in (2, 4) for v in VARIANTS if _divides(v, tp)]


@pytest.mark.parametrize(("variant", "tp_size"), SHARDED, ids=lambda v: getattr(v, "name", str(v)))
def test_sharded(variant: Variant, tp_size: int, subjects: Subjects) -> None:
    """Every rank samples the same tokens, too (the executor compares them)."""
    subject = subjects(variant)
    # Without the longest prompt, which tests nothing about ranks.
    subject = replace(subject, prompts=subject.prompts[1:])
    outputs = generate(subject, tp_size, logprobs=3)
    assert_equal_to_oracle(subject, outputs)
    for answer, output in zip(subject.oracle.answers(subject.prompts), outputs, strict=True):
        for expected, found in zip(answer.logprobs, output.logprobs, strict=True):
            assert len(found) >= 3
            for token_id, logprob in found.items():
                assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=2e-3)


def test_every_family_is_sharded() -> None:
    families = {variant.model_type for variant in VARIANTS}
    for tp_size in (2, 4):
        assert {v.model_type for v, size in SHARDED if size == tp_size} == families


@all_variants
def test_on_a_gpus_way(
    variant: Variant, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, linear biases and learned positions, over gathered context and in padded batches."""
    walk = walk_the_gpus_way(monkeypatch)
    subject = subjects(variant)
    outputs = generate(subject, max_num_batched_tokens=3 * CHUNK, max_num_seqs=8)
    assert_equal_to_oracle(subject, outputs)
    assert min(walk.gathers, walk.prefills, walk.replays, walk.whole) > 0


def test_ranks_on_a_gpus_way(subjects: Subjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that contain sums, and steps that begin early. All ranks must do the same, or one of
    them waits for the others in a different exchange."""
    walk = walk_the_gpus_way(monkeypatch)
    subject = subjects(next(variant for variant in VARIANTS if _divides(variant, 2)))
    args = {"max_num_batched_tokens": 3 * CHUNK, "num_device_blocks_override": JUST_ONE + 1}
    outputs = generate(subject, 2, max_num_seqs=8, **args)
    assert_equal_to_oracle(subject, outputs)
    assert min(walk.gathers, walk.prefills, walk.replays, walk.whole) > 0
