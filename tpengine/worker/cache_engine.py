"""The KV cache of one rank: a K and a V tensor per layer, divided into blocks."""

from __future__ import annotations

import math

import torch

from tpengine.layers.attention import KVCache
from tpengine.ops.cache import kv_cache_shapes


def block_bytes(
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
) -> int:
    """Bytes of one block over all layers, K and V."""
    shapes = kv_cache_shapes(device.type, dtype, 1, block_size, num_kv_heads, head_dim)
    return num_layers * dtype.itemsize * sum(math.prod(shape) for shape in shapes)


class CacheEngine:
    """Allocates the cache and hands each layer its part.

    Attributes:
        kv_caches: per layer (K, V), laid out as the device's kernels like it
            (`ops.cache.kv_cache_shapes`).
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        k_shape, v_shape = kv_cache_shapes(
            device.type, dtype, num_blocks, block_size, num_kv_heads, head_dim
        )
        # Left uninitialised: no kernel reads a slot that was not written, and on CPU untouched
        # pages cost nothing.
        self.kv_caches: list[KVCache] = [
            (
                torch.empty(k_shape, dtype=dtype, device=device),
                torch.empty(v_shape, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]
        self.block_size = block_size
        self.num_blocks = num_blocks
