"""Decode steps of every family are recorded on CPU: all their ops are tpengine's own."""

from __future__ import annotations

import pytest
from support.subjects import Subjects
from support.variants import VARIANTS, Variant

from tpengine import EngineArgs, LLMEngine
from tpengine.ops.library import cpu_isa

pytestmark = pytest.mark.skipif(
    cpu_isa() not in ("avx512", "avx512bf16"), reason="linear layers are torch's own here"
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_recorded(variant: Variant, subjects: Subjects) -> None:
    """This makes `test_greedy` compare recorded steps with transformers."""
    args = EngineArgs(
        str(subjects.folder(variant)),
        dtype="float32",
        max_model_len=256,
        num_device_blocks_override=40,
        disable_log_stats=True,
    )
    with LLMEngine.from_engine_args(args) as engine:
        assert engine.stats().ledgers[0].graphs_bytes > 0
