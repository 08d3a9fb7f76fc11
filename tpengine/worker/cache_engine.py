"""The KV cache of one rank: a K and a V tensor per layer, divided into blocks.

The layout of a block on each device is decided in `ops.cache_ops.kv_cache_shapes`, because the
kernels read it; this file only allocates the shapes that it returns, and copies whole blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tpengine.messages import BlockMoves
from tpengine.ops import cache_ops, huge_pages
from tpengine.worker.gpu.pooled_blocks import LayerCaches, PooledBlocks
from tpengine.worker.rank_memory import Empty, RankMemory

_POPULATE_S = 0.1
"""Limit of the time that `populate` adds to the start. Without it the first prompts spend up to a
tenth of their time on page faults, on a virtual machine."""


class CacheShape(NamedTuple):
    """What a block of a rank's KV cache holds.

    Attributes:
        dtype: of the cache: the model's, or int8 on a CPU, or float8_e4m3fn on a GPU.
        num_kv_heads: of this rank.
    """

    device: torch.device
    dtype: torch.dtype
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        return self.num_layers * self.dtype.itemsize * sum(map(math.prod, self.of_layer(1)))

    def of_layer(self, num_blocks: int) -> tuple[cache_ops.Shape, cache_ops.Shape]:
        """Shapes of a layer's K and V."""
        device, dtype, block_size, _, *heads = self
        return cache_ops.kv_cache_shapes(device.type, dtype, num_blocks, block_size, *heads)


class CacheEngine:
    """Allocates the cache, hands each layer its part, and copies and swaps blocks.

    On a GPU the layers' parts are one tensor, so that one launch copies a block of all layers and a
    swap moves it over the bus in one piece, on a stream of its own.

    Args:
        num_host_blocks: blocks of the host's pool, which holds swapped blocks in the device's
            layout. For CUDA it is pinned memory.
        memory: for the blocks; it outlives the process. None: they end with it.

    Attributes:
        kv_caches: per layer (K, V), in the layout of `ops.cache_ops.kv_cache_shapes`.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        num_host_blocks: int = 0,
        memory: RankMemory | None = None,
    ) -> None:
        device, dtype, num_layers = shape.device, shape.dtype, shape.num_layers
        k_shape, v_shape = shape.of_layer(num_blocks)
        self._device = device
        self._blocks: PooledBlocks | LayerBlocks
        # Left uninitialised: no kernel reads a slot that was not written.
        if device.type == "cpu":
            empty: Empty = huge_pages.empty
            if memory is not None:
                num_bytes = shape.block_bytes * (num_blocks + num_host_blocks)
                empty = memory.keep_blocks(num_bytes, num_tensors=4 * num_layers)
            caches = LayerCaches(
                (empty(k_shape, dtype), empty(v_shape, dtype)) for _ in range(num_layers)
            )
            self._blocks = LayerBlocks(caches, num_host_blocks, empty)
        else:
            where = dtype, device, num_host_blocks, memory
            self._blocks = PooledBlocks.allocate((2 * num_layers, *k_shape), *where)
        self.kv_caches = self._blocks.caches
        self._memory = memory

    def share(self, num_layers: int) -> None:
        """Gives the only layer's part to all layers of the model."""
        (pair,) = self.kv_caches
        self.kv_caches.extend([pair] * (num_layers - 1))

    def move(self, moves: BlockMoves, step: int) -> None:
        """Copies blocks to the host, from it, and on the device; the next kernels see the result.

        A step that is sent again moves nothing twice: later parts of it may have written into what
        it copied from. Within the swaps, and within the copies, no block is source and target, so
        that those which a lost rank has begun may be done again.

        Args:
            step: its number.

        Raises:
            RuntimeError: a block is out of range.
        """
        swap_number, copy_number = 2 * step, 2 * step + 1
        done = 0 if self._memory is None else self._memory.moves_done
        if (moves.swap_outs or moves.swap_ins) and done < swap_number:
            self._blocks.swap(moves)
            self._note_moved(swap_number)
        if moves.copies and done < copy_number:
            self._blocks.copy(moves.copies)
            self._note_moved(copy_number)

    def _note_moved(self, number: int) -> None:
        if self._memory is not None:
            self._memory.moves_done = number

    def populate(self, num_bytes: int) -> int:
        """On CPU: has the kernel back the first blocks, which are used first, with memory, for at
        most `num_bytes` and `_POPULATE_S`. On a GPU it does nothing: the memory is there.

        Returns:
            Bytes of each layer's K, and as many of its V, that now have memory.
        """
        if self._device.type != "cpu":
            return 0
        tensors = [x for pair in self.kv_caches for x in pair]
        return huge_pages.populate(tensors, num_bytes, _POPULATE_S)


class LayerBlocks:
    """The blocks of a cache whose layers have tensors of their own."""

    def __init__(self, caches: LayerCaches, num_host_blocks: int, empty: Empty) -> None:
        self.caches = caches
        self._host_caches = [
            tuple(empty((num_host_blocks, *x.shape[1:]), x.dtype) for x in pair) for pair in caches
        ]

    def swap(self, moves: BlockMoves) -> None:
        """Copies blocks to the host and from it."""
        for pair, host_pair in zip(self.caches, self._host_caches, strict=True):
            for cache, host in zip(pair, host_pair, strict=True):
                cache_ops.copy_across(cache, host, moves.swap_outs)
                cache_ops.copy_across(host, cache, moves.swap_ins)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks within the cache."""
        sources_and_targets = torch.tensor(pairs, dtype=torch.int64)
        for k_cache, v_cache in self.caches:
            cache_ops.copy_blocks(k_cache, v_cache, sources_and_targets)
