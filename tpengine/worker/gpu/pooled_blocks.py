"""The blocks of a GPU's KV cache: one tensor for all layers, and pinned memory on the host."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch

from tpengine.layers.attention import KVCache
from tpengine.layers.device_values import upload
from tpengine.messages import BlockMoves
from tpengine.ops import cache_ops
from tpengine.worker.rank_memory import RankMemory

_STAGING_BYTES = 64 << 20
"""Of a copy to or from the host: large enough for the bus to reach its full speed."""
_PIECE_BYTES = 256 << 20
"""Of the host's pool. torch pins a power of two of bytes: 32 GiB for a tensor of 17 GiB."""


class PooledBlocks:
    """The blocks of a cache in one tensor.

    Args:
        pool: `[2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim]`: K and V of each
            layer.
        host: pinned memory for the host's blocks, `[num_host_blocks, 2 * num_layers, block_size,
            num_kv_heads, head_dim]`; None: it is allocated.
    """

    def __init__(
        self, pool: torch.Tensor, num_host_blocks: int, host: torch.Tensor | None = None
    ) -> None:
        pieces = pool.unbind()
        self.caches = LayerCaches(zip(pieces[::2], pieces[1::2], strict=True))
        self._pool = pool
        self._stream: Any = None
        if pool.device.type == "cuda" and num_host_blocks:
            self._stream = torch.cuda.Stream(pool.device)
        one_block = (pool.shape[0], *pool.shape[2:])
        block_bytes = math.prod(one_block) * pool.itemsize
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes if host is None else len(host))
        self._host = [] if host is None else [host]
        self._host += [
            torch.empty(
                (min(self._piece_blocks, num_host_blocks - first), *one_block),
                dtype=pool.dtype,
                pin_memory=self._stream is not None,
            )
            for first in range(sum(map(len, self._host)), num_host_blocks, self._piece_blocks)
        ]
        num_staged = staged_blocks(block_bytes, num_host_blocks)
        self._staging = torch.empty((num_staged, *one_block), dtype=pool.dtype, device=pool.device)

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int,
        memory: RankMemory | None,
    ) -> Self:
        """Makes a pool of this shape, which is left uninitialised.

        Args:
            memory: for the blocks; it outlives the process. None: they end with it.
        """
        if memory is None:
            return cls(torch.empty(shape, dtype=dtype, device=device), num_host_blocks)
        pool = memory.keep_blocks(math.prod(shape) * dtype.itemsize, num_tensors=1)(shape, dtype)
        host_shape = num_host_blocks, shape[0], *shape[2:]
        return cls(pool, num_host_blocks, memory.keep_host_blocks(host_shape, dtype))

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
