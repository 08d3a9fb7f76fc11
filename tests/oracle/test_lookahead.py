"""Drafts change no token and no bit of a log probability, in any form, on any instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from ops.cases import use_cpu_isa
from support.engines import greedy, open_engine, serve
from support.foretold import foretell, totals
from support.subjects import BLOCK_SIZE, Subjects
from support.variants import VARIANTS, Variant

from oracle.test_families import all_windowed
from tpengine import SamplingParams
from tpengine.ops.library import supported_cpu_isas
from tpengine.scheduling.drafter import RowPrices

FORMS: dict[str, dict[str, str]] = {
    "f32": {},
    "bf16": {"dtype": "bfloat16"},
    "f32, int8 cache": {"kv_cache_dtype": "int8"},
    "bf16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, bf16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-g64, bf16": {"dtype": "bfloat16", "quantization": "int4-g64"},
}
PROMPTS = [list(range(3 + 40 * i, 3 + 40 * i + n)) for i, n in enumerate((33, 5, 18, 1))]
PARAMS = [
    greedy(24, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs=0, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=6, max_tokens=24, n=2, top_k=50, ignore_eos=True),
    greedy(24, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=1),
]


def matrix(variants: Sequence[Variant]) -> list[Any]:
    """Each form on one instruction set, and each instruction set with a form, over the families;
    `make soak` has all."""
    isas, cases = supported_cpu_isas(), []
    kinds = list(itertools.product(isas, FORMS))
    for place, (isa, form) in enumerate(kinds):
        variant = variants[place * len(variants) // len(kinds)]
        is_on_diagonal = isas.index(isa) == list(FORMS).index(form) % len(isas)
        marks = () if is_on_diagonal else pytest.mark.soak
        cases.append(
            pytest.param(variant, isa, form, marks=marks, id=f"{variant.name}-{isa}-{form}")
        )
    return cases


CASES = matrix([variant for variant in VARIANTS if not all_windowed(variant)])
"""A model whose layers all have a window has no draft model."""


@pytest.mark.parametrize(("variant", "isa", "form"), CASES)
def test_drafts_change_no_bit(variant: Variant, isa: str, form: str, subjects: Subjects) -> None:
    args = {
        "max_model_len": 64,
        "block_size": BLOCK_SIZE,
        "cpu_kv_cache_space": 0.05,
        **FORMS[form],
    }
    with use_cpu_isa(isa):
        with open_engine(subjects.folder(variant), **args) as engine:
            expected = [output.outputs for output in serve(engine, PROMPTS, PARAMS)]
        args |= {"speculative_model": "[ngram]", "num_speculative_tokens": 4}
        with open_engine(subjects.folder(variant), **args) as engine:
            texts = zip(PROMPTS, expected, strict=True)
            drafter = foretell(engine, {tuple(p): [o.token_ids for o in own] for p, own in texts})
            served = [output.outputs for output in serve(engine, PROMPTS, PARAMS)]
    drafted, accepted = totals(drafter)
    assert 20 < accepted < drafted
    assert served == expected  # log probabilities too


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_ranks_draft_together(
    subjects: Subjects, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.01))
    folder = subjects.folder(next(v for v in VARIANTS if v.name == "llama-biases"))
    args = {"max_model_len": 64, "num_device_blocks_override": 64, "enforce_eager": enforce_eager}
    with open_engine(folder, 2, tensor_parallel_size=2, **args) as engine:
        expected = [output.outputs for output in serve(engine, PROMPTS[:3], PARAMS[:3])]
    args["speculative_model"] = str(folder)
    with open_engine(folder, 2, tensor_parallel_size=2, **args) as engine:
        served = [output.outputs for output in serve(engine, PROMPTS[:3], PARAMS[:3])]
        drafted, accepted = totals(engine._scheduler.drafter)
    assert served == expected
    assert accepted == drafted > 30


@pytest.mark.parametrize(("variant", "isa", "form"), CASES)
def test_a_model_drafts_for_itself(
    variant: Variant, isa: str, form: str, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts come true, greedy and sampled, if both are rounded alike."""
    monkeypatch.setattr(RowPrices, "cost", lambda self, num_rows: (1.0, 0.01))
    folder, params = subjects.folder(variant), PARAMS[:3]
    args = {"max_model_len": 64, "block_size": BLOCK_SIZE, "cpu_kv_cache_space": 0.05}
    args["swap_space"] = 0.01
    with use_cpu_isa(isa):
        with open_engine(folder, **args, **FORMS[form]) as engine:
            expected = [output.outputs for output in serve(engine, PROMPTS[:3], params)]
            plain, blocks = engine.stats().ledgers[0], engine.num_total_blocks
        args["speculative_model"] = str(folder)
        with open_engine(folder, **args, **FORMS[form]) as engine:
            served = [output.outputs for output in serve(engine, PROMPTS[:3], params)]
            drafted, accepted = totals(engine._scheduler.drafter)
            ledger = engine.stats().ledgers[0]
            assert engine.num_total_blocks == blocks // 2
    assert served == expected
    assert drafted > 30
    assert accepted == drafted or "quantization" in FORMS[form]
    assert ledger.block_bytes == 2 * plain.block_bytes
    assert ledger.num_host_blocks == plain.num_host_blocks > 0
    assert ledger.weights_bytes >= 2 * plain.weights_bytes
