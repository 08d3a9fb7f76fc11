"""Pipelines of every family: ids are those of transformers. Where they divide no sum, log
probabilities are those of one process as bits, in any form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ops.cases import use_cpu_isa
from support.engines import open_engine, serve
from support.subjects import BLOCK_SIZE, Subjects, assert_equal_to_oracle, generate
from support.variants import VARIANTS, Variant

from oracle.test_families import all_windowed, divides
from oracle.test_lookahead import FORMS, PARAMS, PROMPTS, matrix

SHAPES = ((4, 1), (2, 1), (2, 2), (3, 1))
"""Stages, and ranks of each."""


def deeper(variant: Variant) -> Variant:
    """The variant with four layers, so that four stages can share them."""
    config = dict(variant.config)
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            config[key] = [*config[key][:3], *config[key]][:4]
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = 4
    return replace(variant, name=f"{variant.name}-4", config=config)


def cases() -> list[Any]:
    """`make test` has the first variant of each family in four stages, and each other variant in
    one of the shapes; the rest is marked soak."""
    rows, families = [], set()
    for place, variant in enumerate(VARIANTS):
        for number, (stages, tp_size) in enumerate(SHAPES):
            is_first = number == 0 and variant.model_type not in families
            is_kept = is_first or (number == place % 4 and variant.model_type in families)
            marks = [] if is_kept else [pytest.mark.soak]
            if divides(variant, tp_size):
                name = f"{variant.name}-{stages}x{tp_size}"
                rows.append(pytest.param(variant, stages, tp_size, id=name, marks=marks))
        families.add(variant.model_type)
    return rows


@pytest.mark.parametrize(("variant", "stages", "tp_size"), cases())
def test_ids_of_transformers(
    variant: Variant, stages: int, tp_size: int, subjects: Subjects
) -> None:
    """Prompts in parts, several of which are in flight."""
    subject = subjects(deeper(variant))
    args = {"pipeline_parallel_size": stages, "max_num_batched_tokens": 64}
    ranks: list[int] = []
    outputs = generate(
        subject, tp_size, look=lambda engine: ranks.append(len(engine.stats().ledgers)), **args
    )
    assert ranks == [stages * tp_size]
    assert_equal_to_oracle(subject, outputs)


def answers(subjects: Subjects, variant: Variant, tp_size: int = 1, **args: Any) -> list[Any]:
    sizes = {"max_model_len": 64, "block_size": BLOCK_SIZE, "cpu_kv_cache_space": 0.05}
    with open_engine(subjects.folder(variant), tp_size, **sizes, **args) as engine:
        return [output.outputs for output in serve(engine, PROMPTS, PARAMS)]


@pytest.mark.parametrize(("variant", "isa", "form"), matrix([*VARIANTS[7:], *VARIANTS[:7]]))
def test_stages_change_no_bit(variant: Variant, isa: str, form: str, subjects: Subjects) -> None:
    """Not of the log probabilities either: what passes a boundary is rounded as between layers."""
    with use_cpu_isa(isa):
        expected = answers(subjects, variant, **FORMS[form])
        assert answers(subjects, variant, pipeline_parallel_size=2, **FORMS[form]) == expected


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_two_stages_of_two_ranks_are_two_ranks(form: str, subjects: Subjects) -> None:
    """Of two tokens that are equally likely, which one is reported as the likeliest depends on the
    number of rows (torch.topk), so the chosen ones are compared."""
    variant = next(v for v in VARIANTS if divides(v, 2) and not all_windowed(v))
    sides = [
        answers(subjects, variant, 2, pipeline_parallel_size=stages, **FORMS[form])
        for stages in (1, 2)
    ]
    whole, staged = (
        [(o.token_ids, o.cumulative_logprob) for outputs in side for o in outputs] for side in sides
    )
    assert staged == whole
