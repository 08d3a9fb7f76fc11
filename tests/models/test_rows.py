"""A row's logits are the same bits however it is computed: tokens do not depend on neighbours, on
chunks, on prefix hits and on drafts.

docs/internals.md names what is exempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from ops.cases import use_cpu_isa
from support.bare_model import BareModel, step_metadata
from support.subjects import Subjects
from support.variants import VARIANTS, Variant

from tpengine.ops.library import supported_cpu_isas

F32, BF16 = torch.float32, torch.bfloat16
FORMS = (
    (F32, F32, None), (BF16, BF16, None), (F32, torch.int8, None), (BF16, torch.int8, None),
    (F32, F32, "int8"), (BF16, BF16, "int8"), (F32, F32, "int4"), (BF16, BF16, "int4-g64"),
)  # fmt: skip
"""Dtype, dtype of the KV cache, quantization."""
LENGTH, NUM_LAST = 37, 5
"""Tokens of the sequence that is looked at, and how many of its last ones."""
OTHERS = (1, 30, 2, 55, 16, 17, 9, 40, 3, 64, 5, 33)
TARGET = len(OTHERS) // 2


def matrix() -> list[object]:
    """Each instruction set with each form once, over all families; `make soak` has them of every
    variant."""
    kinds, cases = list(itertools.product(supported_cpu_isas(), FORMS)), list[object]()
    for number, variant in enumerate(VARIANTS):
        for place, (isa, form) in enumerate(kinds):
            is_on_diagonal = place * len(VARIANTS) // len(kinds) == number
            marks = () if is_on_diagonal else pytest.mark.soak
            texts = [variant.name, isa, *(str(part).removeprefix("torch.") for part in form)]
            cases.append(pytest.param(variant, isa, *form, marks=marks, id="-".join(texts)))
    return cases


class Rows:
    """Sequences of a model, of which one is looked at."""

    def __init__(self, bare: BareModel) -> None:
        self._bare = bare
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(3, 500, (len(OTHERS) + 1, 64), generator=generator)
        self._token_ids = ids.int()
        self._lengths = dict(enumerate(OTHERS)) | {TARGET: LENGTH, len(OTHERS): OTHERS[TARGET]}

    def last(self, sizes: Sequence[int], is_crowded: bool = False) -> torch.Tensor:
        """The logits of the last tokens of the sequence, `[NUM_LAST, vocab_size]`.

        Args:
            sizes: how many of its tokens each step computes.
            is_crowded: whether other sequences are computed in these steps, as decodes where they
                can be.
        """
        for x in self._bare.kv_caches:
            for part in x:
                part.zero_()
        answers, done = [], 0
        for size in sizes:
            step = {TARGET: range(done, done + size)}
            if is_crowded:
                for other, length in self._lengths.items():
                    first = 0 if done == 0 else length - 1
                    step.setdefault(other, range(first, length))
            # Decodes come first; a new sequence of one token is one as well.
            step = dict(sorted(step.items(), key=lambda item: len(item[1]) > 1))
            num_decodes = sum(len(own) == 1 for own in step.values())
            ids = [self._token_ids[i, own.start : own.stop] for i, own in step.items()]
            logits = self._bare.step(torch.cat(ids), step_metadata(step, num_decodes))
            parts = logits.split([len(own) for own in step.values()])
            answers.append(parts[list(step).index(TARGET)])
            done += size
        assert done == LENGTH
        return torch.cat(answers)[-NUM_LAST:]


@pytest.mark.parametrize(("variant", "isa", "dtype", "cache_dtype", "quantization"), matrix())
def test_same_bits(
    variant: Variant,
    isa: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    quantization: str | None,
    subjects: Subjects,
) -> None:
    with use_cpu_isa(isa):
        bare = BareModel(
            subjects.folder(variant),
            quantization=quantization,
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_sequences=len(OTHERS) + 1,
        )
        rows = Rows(bare)
        whole = rows.last([LENGTH])
        ones = [1] * NUM_LAST
        for name, logits in {
            "decoded alone": rows.last([LENGTH - NUM_LAST, *ones]),
            "decoded in a crowd": rows.last([LENGTH - NUM_LAST, *ones], is_crowded=True),
            "several new tokens": rows.last([LENGTH - NUM_LAST, NUM_LAST]),
            "a chunk in a crowd": rows.last([16, LENGTH - 16], is_crowded=True),
            "small chunks": rows.last([7] * 5 + [2]),
        }.items():
            assert torch.equal(logits, whole), name
