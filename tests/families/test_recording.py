"""Which families' decode steps are recorded on CPU: all whose ops are tpengine's own."""

from __future__ import annotations

import pytest

from families.conftest import Subjects
from families.variants import VARIANTS, Variant
from tpengine import EngineArgs, LLMEngine
from tpengine.ops.library import cpu_isa

OP_BY_OP = ("opt", "bloom")
"""Their LayerNorm is torch's."""

pytestmark = pytest.mark.skipif(
    cpu_isa() not in ("avx512", "avx512bf16"), reason="linear layers are torch's own here"
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_recorded_or_op_by_op(variant: Variant, subjects: Subjects) -> None:
    """Those that are recorded are compared with transformers in `test_greedy`."""
    args = EngineArgs(
        str(subjects.folder(variant)),
        dtype="float32",
        max_model_len=256,
        num_device_blocks_override=40,
        disable_log_stats=True,
    )
    with LLMEngine.from_engine_args(args) as engine:
        worker = engine._executor._worker  # type: ignore[attr-defined]
        assert (worker._runner._recorded is None) == variant.name.startswith(OP_BY_OP)
