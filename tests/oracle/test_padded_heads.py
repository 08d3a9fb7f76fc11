"""Greedy ids of models whose heads the KV cache pads: in chunks, with preemption, on ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.step_log import log_steps
from support.subjects import BLOCK_SIZE, Subjects, assert_equal_to_oracle, generate
from support.variants import PADDED, Variant

RANKS = {"llama": 2, "gpt2": 2, "bloom": 4}
"""By model type, where it is more than one."""


@pytest.mark.parametrize("variant", PADDED, ids=lambda variant: variant.name)
def test_ids_of_transformers(variant: Variant, subjects: Subjects) -> None:
    subject = subjects(variant)
    subject = replace(subject, prompts=subject.prompts[1:])
    tight = {"max_model_len": 7 * BLOCK_SIZE, "num_device_blocks_override": 7}
    with log_steps() as log:
        tp_size = RANKS.get(variant.model_type, 1)
        outputs = generate(subject, tp_size, max_num_batched_tokens=BLOCK_SIZE, **tight)
    assert log.num_preemptions > 0
    assert_equal_to_oracle(subject, outputs)
