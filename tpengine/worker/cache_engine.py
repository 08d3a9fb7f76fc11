"""The KV cache of one rank: a K and a V tensor per layer, divided into blocks.

The layout of a block on each device is decided in `ops.cache_ops.kv_cache_shapes`, because the
kernels read it; this file only allocates the shapes that it returns, and copies whole blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from tpengine.layers.attention import KVCache
from tpengine.layers.device_values import upload
from tpengine.messages import BlockMoves
from tpengine.ops import cache_ops, huge_pages
from tpengine.worker.rank_memory import RankMemory

_STAGING_BYTES = 64 << 20
"""Of a copy to or from the host: large enough for the bus to reach its full speed."""
_PIECE_BYTES = 256 << 20
"""Of the host's pool. torch pins a power of two of bytes: 32 GiB for a tensor of 17 GiB."""
_POPULATE_S = 0.1
"""Limit of the time that `populate` adds to the start. Without it the first prompts spend up to a
tenth of their time on page faults, on a virtual machine."""

_BLOCKS = "blocks"
Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a tensor of this shape and dtype."""


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


class KeptBlocks:
    """The part of a rank's memory that holds the blocks of its cache.

    Args:
        memory: outlives the process.
    """

    def __init__(
        self, memory: RankMemory, shape: CacheShape, num_blocks: int, num_host_blocks: int
    ) -> None:
        num_tensors = 4 * shape.num_layers  # each begins with a large page
        num_bytes = shape.block_bytes * (num_blocks + num_host_blocks)
        self._rest = memory.section(_BLOCKS, num_bytes + num_tensors * huge_pages.PAGE_BYTES)
        self.memory = memory

    @staticmethod
    def drop(memory: RankMemory) -> None:
        """Gives the memory of all blocks back."""
        memory.drop(_BLOCKS)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the next tensor of the cache: with its content, if a lost rank had it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        taken = -(-num_bytes // huge_pages.PAGE_BYTES) * huge_pages.PAGE_BYTES
        tensor, self._rest = self._rest[:num_bytes], self._rest[taken:]
        return tensor.view(dtype).view(shape)


class CacheEngine:
    """Allocates the cache, hands each layer its part, and copies and swaps blocks.

    On a GPU the layers' parts are one tensor, so that one launch copies a block of all layers and a
    swap moves it over the bus in one piece, on a stream of its own.

    Args:
        num_host_blocks: blocks of the host's pool, which holds swapped blocks in the device's
            layout. For CUDA it is pinned memory.
        kept: memory for the blocks that outlives the process, on CPU; None: it ends with it.

    Attributes:
        kv_caches: per layer (K, V), in the layout of `ops.cache_ops.kv_cache_shapes`.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        num_host_blocks: int = 0,
        kept: KeptBlocks | None = None,
    ) -> None:
        device, dtype, num_layers = shape.device, shape.dtype, shape.num_layers
        k_shape, v_shape = shape.of_layer(num_blocks)
        self._device = device
        self._blocks: PooledBlocks | LayerBlocks
        # Left uninitialised: no kernel reads a slot that was not written.
        if device.type == "cpu":
            empty = huge_pages.empty if kept is None else kept.empty
            caches = LayerCaches(
                (empty(k_shape, dtype), empty(v_shape, dtype)) for _ in range(num_layers)
            )
            self._blocks = LayerBlocks(caches, num_host_blocks, empty)
        else:
            pool = torch.empty((2 * num_layers, *k_shape), dtype=dtype, device=device)
            self._blocks = PooledBlocks(pool, num_host_blocks)
        self.kv_caches = self._blocks.caches
        self._memory = None if kept is None else kept.memory

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


class PooledBlocks:
    """The blocks of a cache in one tensor.

    Args:
        pool: `[2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim]`: K and V of each
            layer.
    """

    def __init__(self, pool: torch.Tensor, num_host_blocks: int) -> None:
        pieces = pool.unbind()
        self.caches = LayerCaches(zip(pieces[::2], pieces[1::2], strict=True))
        self._pool = pool
        self._stream: Any = None
        if pool.device.type == "cuda" and num_host_blocks:
            self._stream = torch.cuda.Stream(pool.device)
        one_block = (pool.shape[0], *pool.shape[2:])
        block_bytes = math.prod(one_block) * pool.itemsize
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes)
        self._host = [
            torch.empty(
                (min(self._piece_blocks, num_host_blocks - first), *one_block),
                dtype=pool.dtype,
                pin_memory=self._stream is not None,
            )
            for first in range(0, num_host_blocks, self._piece_blocks)
        ]
        num_staged = staged_blocks(block_bytes, num_host_blocks)
        self._staging = torch.empty((num_staged, *one_block), dtype=pool.dtype, device=pool.device)

    def swap(self, moves: BlockMoves) -> None:
        """Copies blocks to the host and from it; on CUDA without delaying the current stream.

        A block crosses the bus with all its layers at once, so one event at the end serves every
        layer. Layer by layer, the first layer could start sooner, but the pieces would be too small
        for the speed of the bus.
        """
        if self._stream is None:
            self._swap_now(moves)
            return
        # The swap waits for the writes of the previous step; the next kernels wait for the event.
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            self._swap_now(moves)
            event = torch.cuda.Event()
            event.record(self._stream)
        self.caches.event = event

    def _swap_now(self, moves: BlockMoves) -> None:
        outs, ins = defaultdict(list), defaultdict(list)  # by piece of the host's pool
        for block, host_block in moves.swap_outs:
            piece, place = divmod(host_block, self._piece_blocks)
            outs[piece].append((block, place))
        for host_block, block in moves.swap_ins:
            piece, place = divmod(host_block, self._piece_blocks)
            ins[piece].append((place, block))
        for piece, pairs in outs.items():
            cache_ops.swap_out(self._host[piece], self._pool, pairs, self._staging)
        for piece, pairs in ins.items():
            cache_ops.swap_in(self._pool, self._host[piece], pairs, self._staging)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks within the cache, after the swaps of the same step."""
        self.caches.wait()
        sources_and_targets = upload(np.array(pairs, np.int64), self._pool.device)
        cache_ops.copy_cache_blocks(self._pool, sources_and_targets)


def staged_blocks(block_bytes: int, num_host_blocks: int) -> int:
    """Returns how many blocks a GPU's staging buffer for swaps holds; 0 without host blocks."""
    return min(num_host_blocks, max(1, _STAGING_BYTES // block_bytes))


class LayerCaches(list[KVCache]):
    """Each layer's (K, V). Iteration first makes the current stream wait for copies of blocks.

    Attributes:
        event: the end of copies on another stream; CUDA only.
    """

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Makes the current stream wait for the copies."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def __iter__(self) -> Iterator[KVCache]:
        self.wait()
        return super().__iter__()
