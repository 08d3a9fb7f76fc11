"""Greedy ids of every family and variant equal those of transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gpu_walk import walk_the_gpus_way
from support.oracle import NUM_OUTPUT_TOKENS, Oracle
from support.step_log import log_steps

from families.conftest import PROMPT_LENGTHS, Subject, Subjects
from families.threaded_executor import ThreadedExecutor
from families.variants import MAX_POSITIONS, VARIANTS, VOCAB_SIZE, Variant
from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.executor.executor import Executor
from tpengine.executor.local_executor import LocalExecutor

BLOCK_SIZE = 16
LONGEST = max(PROMPT_LENGTHS) + NUM_OUTPUT_TOKENS
JUST_ONE = -(-LONGEST // BLOCK_SIZE) + 1
"""Blocks that hold the longest sequence and only a few more tokens."""
CHUNK = 16

all_variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def generate(
    subject: Subject, tp_size: int = 1, logprobs: int | None = None, **args: Any
) -> list[Any]:
    """Answers to all prompts in one batch, from a new engine."""
    engine_args = EngineArgs(
        model=str(subject.folder),
        dtype="float32",
        device="cpu",
        max_model_len=LONGEST,
        block_size=BLOCK_SIZE,
        disable_log_stats=True,
        **({} if "num_device_blocks_override" in args else {"cpu_kv_cache_space": 0.05}),
        **args,
    )
    config = engine_args.create_engine_config("cpu")
    executor: Executor
    executor = LocalExecutor(config) if tp_size == 1 else ThreadedExecutor(config, tp_size)
    engine = LLMEngine(config, executor, log_stats=False)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=logprobs
    )
    try:
        for i, prompt in enumerate(subject.prompts):
            engine.add_request(str(i), None, params, prompt_token_ids=list(prompt))
        done = {}
        while engine.has_unfinished_requests():
            done.update({o.request_id: o for o in engine.step() if o.finished})
    finally:
        engine.shutdown()
    return [done[str(i)].outputs[0] for i in range(len(subject.prompts))]


def assert_equal_to_oracle(subject: Subject, outputs: list[Any]) -> None:
    expected = subject.oracle.answers(subject.prompts)
    for answer, output in zip(expected, outputs, strict=True):
        assert list(output.token_ids) == answer.token_ids, f"prompt of {len(answer.prompt)} tokens"


@all_variants
def test_oracle_could_tell(variant: Variant, subjects: Subjects, tmp_path: Path) -> None:
    """A wrong engine cannot pass: answers vary, and depend on early tokens and on the variant's
    special field."""
    subject = subjects(variant)
    answers = subject.oracle.answers(subject.prompts)
    assert len({token for answer in answers for token in answer.token_ids}) >= 20
    # If every layer has a window, the last token does not see a long prompt's early tokens.
    all_windowed = "sliding_window" in variant.ablation
    early = PROMPT_LENGTHS.index(19) if all_windowed else 0
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
            subject, max_num_batched_tokens=CHUNK, num_device_blocks_override=JUST_ONE
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
