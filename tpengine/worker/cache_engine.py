"""The KV cache of one rank: a K and a V tensor per layer, divided into blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from tpengine.layers.attention import KVCache
from tpengine.messages import BlockMoves
from tpengine.ops import huge_pages
from tpengine.ops.cache import copy_blocks, kv_cache_shapes


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
    """Allocates the cache, hands each layer its part, and moves blocks about.

    Args:
        num_host_blocks: blocks of the host's pool, which holds what is swapped out in the device's
            layout. On CPU it is memory like any other; for CUDA it is pinned.

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
        num_host_blocks: int = 0,
    ) -> None:
        k_shape, v_shape = kv_cache_shapes(
            device.type, dtype, num_blocks, block_size, num_kv_heads, head_dim
        )
        # Left uninitialised: no kernel reads a slot that was not written, and on CPU untouched
        # pages cost nothing.
        self.kv_caches = LayerCaches(
            (_empty(k_shape, dtype, device), _empty(v_shape, dtype, device))
            for _ in range(num_layers)
        )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._device = device
        pinned = device.type == "cuda" and num_host_blocks > 0
        self._host_caches = [
            tuple(
                torch.empty((num_host_blocks, *shape[1:]), dtype=dtype, pin_memory=pinned)
                for shape in (k_shape, v_shape)
            )
            for _ in range(num_layers)
        ]
        self._stream = torch.cuda.Stream(device) if pinned else None

    def move(self, moves: BlockMoves) -> None:
        """Copies blocks to the host, from it, and on the device; the next kernels see the result.

        Raises:
            RuntimeError: a block is out of range.
        """
        if moves.swap_outs or moves.swap_ins:
            self._swap(moves)
        if moves.copies:
            pairs = torch.tensor(moves.copies, dtype=torch.int64, device=self._device)
            for k_cache, v_cache in self.kv_caches:
                copy_blocks(k_cache, v_cache, pairs)

    def _swap(self, moves: BlockMoves) -> None:
        if self._stream is None:
            for layer in range(len(self._host_caches)):
                self._swap_layer(layer, moves)
            return
        # After what the step before has written; a layer's kernels wait for its event only.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for layer in range(len(self._host_caches)):
                self._swap_layer(layer, moves)
                self.kv_caches.events[layer] = torch.cuda.Event()
                self.kv_caches.events[layer].record(self._stream)

    def _swap_layer(self, layer: int, moves: BlockMoves) -> None:
        for cache, host in zip(self.kv_caches[layer], self._host_caches[layer], strict=True):
            _copy_across(cache, host, moves.swap_outs)
            _copy_across(host, cache, moves.swap_ins)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


class LayerCaches(list[KVCache]):
    """Each layer's (K, V); going through them waits for the copies of a layer when it is reached.

    Attributes:
        events: by layer, the end of copies on another stream; CUDA only.
    """

    def __init__(self, caches: Iterable[KVCache]) -> None:
        super().__init__(caches)
        self.events: dict[int, torch.cuda.Event] = {}

    def __iter__(self) -> Iterator[KVCache]:
        for layer in range(len(self)):
            event = self.events.pop(layer, None)
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            yield self[layer]


def _copy_across(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copies blocks from one device to another; neighbours that stay neighbours go as one."""
    for first_source, first_target, count in _runs(pairs):
        target[first_target : first_target + count].copy_(
            source[first_source : first_source + count], non_blocking=True
        )


def _runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(source, target, count) of stretches in which both go up by one."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs:
            first_source, first_target, count = runs[-1]
            if (source, target) == (first_source + count, first_target + count):
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source, target, 1))
    return runs
