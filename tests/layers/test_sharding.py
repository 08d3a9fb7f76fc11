"""Groups of 2 and 4 ranks in one process give the same logits as one rank."""

from __future__ import annotations

import pytest
import torch
from support.bare_model import PROMPTS, BareModel, logits_in_transformers
from support.models import ModelShop
from support.ranks import run_ranks
from support.tiny_llama import TinyLlama

from tpengine.distributed.parallel_state import ParallelState

SHARDED = {
    "tied": TinyLlama(64, 8, 4, tied=True),
    "untied": TinyLlama(64, 8, 4, max_shard_size="200KB"),
    "kv heads replicated": TinyLlama(64, 8, 2),
    "one kv head, biases": TinyLlama(64, 4, 1, bias=True),
    "vocabulary padded, tied": TinyLlama(64, 4, 4, vocab_size=509, tied=True),
    "vocabulary padded, untied": TinyLlama(64, 4, 4, vocab_size=510),
    "mlp padded": TinyLlama(64, 8, 4, intermediate_size=190),
    "last rank has padding only": TinyLlama(64, 4, 4, vocab_size=501, tied=True),
}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", list(SHARDED))
def test_logits_of_ranks_equal_the_whole(models: ModelShop, name: str, tp_size: int) -> None:
    folder = models.folder(SHARDED[name])
    with torch.inference_mode():
        one_rank = BareModel(folder)
        whole = one_rank.logits()
    expected = logits_in_transformers(models.oracle(folder).model)
    torch.testing.assert_close(whole, expected, atol=1e-3, rtol=1e-4)

    def live(parallel: ParallelState) -> tuple[torch.Tensor, int]:
        model = BareModel(folder, parallel)
        return model.logits(), model.num_bytes

    answers, num_collectives = run_ranks(tp_size, live)
    # every rank has all positions' angles, in float32
    table_bytes = 4 * SHARDED[name].max_positions * SHARDED[name].head_dim
    # embedding, two sums per layer, and the gathered logits; twice
    assert num_collectives == 2 * (1 + 2 * SHARDED[name].num_layers + 1)
    first = answers[0][0]
    assert first.shape == (len(PROMPTS[0]) + len(PROMPTS[1]) + 2, SHARDED[name].vocab_size)
    torch.testing.assert_close(first, whole, atol=1e-3, rtol=1e-4)
    for rank, (logits, num_bytes) in enumerate(answers):
        assert rank == 0 or len(logits) == 0, "only rank 0 samples"
        assert num_bytes - table_bytes < (one_rank.num_bytes - table_bytes) / tp_size * 1.4
