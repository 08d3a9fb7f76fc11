"""Embeddings by ranks in processes: as bits those of an engine that loses no rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from support.models import ModelShop
from support.pooling_models import embed_ids
from support.zoo import ZOO

from executor.ray_engines import executor_of, rank_engine

PROMPTS = [list(range(3 + number, 93 + number)) for number in range(12)]


@pytest.mark.parametrize(("tp_size", "num_stages", "pooling"), [(2, 1, "mean"), (1, 2, "last")])
def test_a_lost_rank(models: ModelShop, tp_size: int, num_stages: int, pooling: str) -> None:
    """Prompts are in parts: the sums of the lost ranks are computed again."""
    folder = models.folder(ZOO["d256-2to1-3-layers"])
    options = {"task": "embed", "pooling_type": pooling, "pipeline_parallel_size": num_stages}
    options |= {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    with rank_engine(folder, tp_size, **options) as engine:
        expected = embed_ids(engine, PROMPTS)
        pid = executor_of(engine).places[-1].pid
        after_loss = embed_ids(engine, PROMPTS, lambda: os.kill(pid, signal.SIGKILL))
        assert torch.equal(after_loss, expected)
        assert [record.loss.rank for record in engine.recoveries] == [1]
