"""Blocks that are moved to the host and back have equal contents."""

from __future__ import annotations

import pytest
import torch

from tpengine.messages import BlockMoves
from tpengine.worker.cache_engine import CacheEngine, CacheShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_contents_survive_the_way_there_and_back(dtype: torch.dtype) -> None:
    engine = CacheEngine(CacheShape(torch.device("cpu"), dtype, 8, 2, 2, 16), 8, 5)
    generator = torch.Generator().manual_seed(3)
    for k_cache, v_cache in engine.kv_caches:
        for cache in (k_cache, v_cache):
            cache.copy_(30 * torch.randn(cache.shape, generator=generator))
    before = [(k.clone(), v.clone()) for k, v in engine.kv_caches]
    engine.move(BlockMoves(swap_outs=[(1, 3), (2, 4), (6, 0)]), 1)
    for k_cache, v_cache in engine.kv_caches:
        k_cache.fill_(7)
        v_cache.fill_(7)
    engine.move(BlockMoves(swap_ins=[(3, 5), (0, 2), (4, 0)], copies=[(5, 1), (2, 7)]), 2)
    for (k, v), (old_k, old_v) in zip(engine.kv_caches, before, strict=True):
        for cache, old in ((k, old_k), (v, old_v)):
            for now, then in ((5, 1), (2, 6), (0, 2), (1, 1), (7, 6)):
                assert torch.equal(cache[now], old[then])
            assert (cache[3] == 7).all()
            assert (cache[4] == 7).all()
