"""After the last layer's attention only the tokens that are looked at go on, and nothing that is
computed of them changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from families.conftest import Subjects
from families.variants import VARIANTS, Variant
from tpengine import EngineArgs, LLMEngine
from tpengine.layers.attention import AttentionMetadata, KVCache

PROMPT_LENGTHS = (3, 6)
WANTED = [2, 8]
BLOCK_SIZE = 16


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_bits_and_work(variant: Variant, subjects: Subjects) -> None:
    args = EngineArgs(
        str(subjects.folder(variant)),
        dtype="float32",
        max_model_len=256,
        block_size=BLOCK_SIZE,
        num_device_blocks_override=40,
        disable_log_stats=True,
    )
    with LLMEngine.from_engine_args(args) as engine:
        runner = engine._executor._worker._runner  # type: ignore[attr-defined]
        model, caches = runner.model, runner._kv_caches
        num_tokens = sum(PROMPT_LENGTHS)
        token_ids = torch.arange(3, 3 + num_tokens, dtype=torch.int32)
        metadata = prefill_metadata()
        clear(caches)
        everything = model.forward(token_ids, caches, metadata)
        cached = [x[:2].clone() for pair in caches for x in pair]
        clear(caches)
        wanted = replace(metadata, wanted_rows=torch.tensor(WANTED))
        activated: list[int] = []
        count_rows((model.h if hasattr(model, "h") else model.layers)[-1], activated)
        some = model.forward(token_ids, caches, wanted)
        assert torch.equal(some, everything[WANTED])
        assert activated == [len(WANTED)]
        # K and V of all tokens, in the last layer too
        for x, expected in zip([x for pair in caches for x in pair], cached, strict=True):
            assert torch.equal(x[:2], expected)


def clear(caches: list[KVCache]) -> None:
    """The two blocks in use; slots that are never written may hold anything otherwise."""
    for pair in caches:
        for x in pair:
            x[:2].zero_()


def prefill_metadata() -> AttentionMetadata:
    """Both prompts as one step, a block each."""
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


def count_rows(layer: object, rows: list[int]) -> None:
    """Notes how many rows reach the layer's MLP."""
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
