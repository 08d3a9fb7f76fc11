"""After the last layer's attention only the wanted tokens are computed, with the same results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.subjects import Subjects
from support.variants import VARIANTS, Variant

from tpengine import EngineArgs, LLMEngine, SamplingParams
from tpengine.layers.attention import AttentionMetadata, KVCache

PROMPT_LENGTHS = (3, 6)
WANTED = [2, 8]
BLOCK_SIZE = 16
STEP_TOKENS = 16


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_bits_and_work(variant: Variant, subjects: Subjects) -> None:
    args = EngineArgs(
        str(subjects.folder(variant)),
        dtype="float32",
        device="cpu",
        max_model_len=256,
        block_size=BLOCK_SIZE,
        num_device_blocks_override=40,
        disable_log_stats=True,
    )
    with LLMEngine.from_engine_args(args) as engine:
        runner = engine._executor._worker._runner  # type: ignore[attr-defined]
        model, caches = runner.model, runner.cache_engine.kv_caches
        num_tokens = sum(PROMPT_LENGTHS)
        token_ids = torch.arange(3, 3 + num_tokens, dtype=torch.int32)
        metadata = prefill_metadata()
        clear(caches)
        everything = model.forward(token_ids, caches, metadata)
        cached = [x[:2].clone() for pair in caches for x in pair]
        clear(caches)
        wanted = replace(metadata, wanted_rows=torch.tensor(WANTED))
        activated: list[int] = []
        count_rows(model, activated)
        some = model.forward(token_ids, caches, wanted)
        assert torch.equal(some, everything[WANTED])
        assert activated == [len(WANTED)]
        # K and V of all tokens, in the last layer too
        for x, expected in zip([x for pair in caches for x in pair], cached, strict=True):
            assert torch.equal(x[:2], expected)


MIXED: dict[str, tuple[list[tuple[int, dict[str, Any]]], list[int]]] = {
    "prompts": ([(5, {}), (9, {})], [2, 2]),
    "chunks": ([(40, {})], [1, 1, 1, 1]),
    "decodes and chunks": ([(5, {"max_tokens": 5}), (30, {})], [1, 1, 2, 2, 1]),
    "log probabilities of a prompt": ([(5, {"prompt_logprobs": 1}), (9, {})], [14, 2]),
    "several sequences of a prompt": ([(5, {"n": 2}), (9, {})], [14, 3]),
}
"""Prompt lengths with their parameters, and the rows that the last layer's MLP has in each step."""


@pytest.mark.parametrize("name", MIXED)
def test_rows_of_mixed_steps(name: str, subjects: Subjects) -> None:
    requests, expected = MIXED[name]
    args = EngineArgs(
        str(subjects.folder(VARIANTS[0])),
        dtype="float32",
        device="cpu",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=STEP_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        block_size=BLOCK_SIZE,
        num_device_blocks_override=40,
        disable_log_stats=True,
    )
    rows: list[int] = []
    with LLMEngine.from_engine_args(args) as engine:
        count_rows(engine._executor._worker._runner.model, rows)  # type: ignore[attr-defined]
        for i, (length, options) in enumerate(requests):
            params = SamplingParams(**{"max_tokens": 2, "ignore_eos": True, **options})
            prompt = list(range(3, 3 + length))
            engine.add_request(str(i), None, params, prompt_token_ids=prompt)
        while engine.has_unfinished_requests():
            engine.step()
    assert rows == expected


def clear(caches: list[KVCache]) -> None:
    """The two blocks in use, zeroed, because slots that are never written may hold any value."""
    for pair in caches:
        for x in pair:
            x[:2].zero_()


def prefill_metadata() -> AttentionMetadata:
    """Both prompts as one step, with one block each."""
    positions = [p for length in PROMPT_LENGTHS for p in range(length)]
    slots = [BLOCK_SIZE * i + p for i, n in enumerate(PROMPT_LENGTHS) for p in range(n)]
    starts = [0, PROMPT_LENGTHS[0], sum(PROMPT_LENGTHS)]
    return AttentionMetadata(
        positions=torch.tensor(positions, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32),
        seq_lens=torch.tensor(PROMPT_LENGTHS, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        num_decodes=0,
    )


def count_rows(model: Any, rows: list[int]) -> None:
    """Records how many rows reach the last layer's MLP."""
    layer = (model.h if hasattr(model, "h") else model.layers)[-1]
    mlp = getattr(layer, "mlp", None)
    linear = next(
        x
        for x in (
            getattr(mlp, "gate_up_proj", None),
            getattr(layer, "fc1", None),
            getattr(layer, "dense_h_to_4h", None),
        )
        if x is not None
    )
    forward = linear.forward

    def counting(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return forward(x)

    linear.forward = counting
