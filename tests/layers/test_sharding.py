"""Groups of 2 and 4 ranks in one process give the same logits as one rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.bare_model import CPU, PROMPTS, BareModel, logits_in_transformers
from support.models import ModelShop
from support.ranks import OwnPart, run_ranks
from support.tiny_llama import TinyLlama

from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers.linear import RowParallelLinear
from tpengine.layers.weights import LoadedTensor, Weights

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


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_parts_add_up(tp_size: int, bias: bool) -> None:
    """Each rank adds the product of its own columns, and only one rank adds the bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 32, generator=generator)
    bias_vector = torch.randn(24, generator=generator)
    x = torch.randn(5, 32, generator=generator)
    parts = []
    for rank in range(tp_size):
        weights = Weights(torch.float32, CPU, ParallelState(rank, tp_size, OwnPart()))
        layer = RowParallelLinear(weights, "down", 32, 24, bias)
        for name, (shard,) in weights.shards.items():
            full = weight if name == "down.weight" else bias_vector
            assert shard.full_shape == tuple(full.shape)
            weights.read(name, LoadedTensor(full))
        weights.finish()
        width = 32 // tp_size
        parts.append(layer.forward(x[:, rank * width : (rank + 1) * width]))
    whole = F.linear(x, weight, bias_vector if bias else None)
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)
