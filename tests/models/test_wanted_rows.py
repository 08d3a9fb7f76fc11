"""After the last layer's attention only the wanted tokens are computed, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bare_model import BareModel, prefill_metadata, tensor
from support.engines import open_engine, serve
from support.patches import on_call
from support.subjects import Subjects
from support.variants import VARIANTS, Variant

from tpengine import SamplingParams
from tpengine.checkpoint.loader import load_model
from tpengine.config import ModelConfig
from tpengine.layers.attention import AttentionMetadata
from tpengine.layers.linear import MergedColumnParallelLinear
from tpengine.layers.moe import Router
from tpengine.layers.weights import Weights
from tpengine.worker import worker

PROMPT_LENGTHS = (3, 6)
WANTED = [2, 8]
STEP_TOKENS = 16


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_bits_and_work(variant: Variant, subjects: Subjects, monkeypatch: Any) -> None:
    bare = BareModel(subjects.folder(variant))
    caches = [x for pair in bare.kv_caches for x in pair]
    metadata = prefill_metadata(PROMPT_LENGTHS)

    def forward(metadata: AttentionMetadata) -> torch.Tensor:
        for x in caches:  # slots that are never written may hold any value
            x.zero_()
        token_ids = tensor(range(3, 3 + sum(PROMPT_LENGTHS)))
        return bare.model.forward(token_ids, bare.kv_caches, metadata)

    everything = forward(metadata)
    cached = [x.clone() for x in caches]
    activated: list[int] = []
    count_rows(monkeypatch, bare.model, activated)
    some = forward(replace(metadata, wanted_rows=torch.tensor(WANTED)))
    assert torch.equal(some, everything[WANTED])
    assert activated == [len(WANTED)]
    # K and V of all tokens, in the last layer too
    assert all(torch.equal(x, expected) for x, expected in zip(caches, cached, strict=True))


MIXED: dict[str, tuple[list[tuple[int, dict[str, Any]]], list[int]]] = {
    "prompts": ([(5, {}), (9, {})], [2, 2]),
    "chunks": ([(40, {})], [1, 1, 1, 1]),
    "decodes and chunks": ([(5, {"max_tokens": 5}), (30, {})], [1, 1, 2, 2, 1]),
    "log probabilities of a prompt": ([(5, {"prompt_logprobs": 1}), (9, {})], [14, 2]),
    "several sequences of a prompt": ([(5, {"n": 2}), (9, {})], [14, 3]),
}
"""Prompt lengths with their parameters, and the rows that the last layer's MLP has in each step."""


@pytest.mark.parametrize("name", MIXED)
def test_rows_of_mixed_steps(
    name: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = MIXED[name]
    rows: list[int] = []

    def load_and_count(config: ModelConfig, weights: Weights, check: Callable[[Any], None]) -> Any:
        model = load_model(config, weights, check)
        count_rows(monkeypatch, model, rows)
        return model

    monkeypatch.setattr(worker, "load_model", load_and_count)
    args = {"max_num_seqs": STEP_TOKENS, "max_num_batched_tokens": STEP_TOKENS}
    args |= {"max_model_len": 256, "num_device_blocks_override": 40, "enforce_eager": True}
    prompts = [list(range(3, 3 + length)) for length, _ in requests]
    params = [SamplingParams(**{"max_tokens": 2, "ignore_eos": True, **own}) for _, own in requests]
    with open_engine(subjects.folder(VARIANTS[0]), **args) as engine:
        rows.clear()  # those of the worst step and of the warm-up
        serve(engine, prompts, params)
    assert rows == expected


def count_rows(patch: pytest.MonkeyPatch, model: Any, rows: list[int]) -> None:
    """Records how many rows reach the last layer's MLP, which begins with a column-parallel linear
    layer or with a router."""
    layer = next(value for value in vars(model).values() if isinstance(value, list))[-1]
    mlp = getattr(layer, "mlp", layer)
    parts = [part for m in (layer, getattr(mlp, "experts", mlp)) for part in vars(m).values()]
    firsts = (MergedColumnParallelLinear, Router)
    linear: Any = next(part for part in parts if isinstance(part, firsts))
    on_call(patch, linear, "forward", lambda x: rows.append(len(x)))
