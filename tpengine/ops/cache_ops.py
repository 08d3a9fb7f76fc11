"""The KV cache: its layout on each device, writes of tokens into slots, copies of blocks.

`kv_cache_shapes` decides the layout, for CPUs and for GPUs; the kernels in `csrc/cpu` and
`csrc/cuda` read and write it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import reference
from tpengine.ops.library import op
from tpengine.ops.reference import SCALE_BYTES

write_kv_cache = op(reference.write_kv_cache, "k_cache", "v_cache")
rotary_write_kv_cache = op(reference.rotary_write_kv_cache, "qkv", "k_cache", "v_cache")
copy_blocks = op(reference.copy_blocks, "k_cache", "v_cache")
copy_cache_blocks = op(reference.copy_cache_blocks, "cache")
pack_blocks = op(reference.pack_blocks, "packed")
unpack_blocks = op(reference.unpack_blocks, "cache")
gather_kv = op(reference.gather_kv, "k", "v")

Shape = tuple[int, ...]
Pairs = list[tuple[int, int]]


def kv_cache_shapes(
    device_type: str,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Shape, Shape]:
    """Returns the shapes of the K cache and the V cache of one layer.

    On a CPU, with p = 2 for 16-bit types and 1 for float32:

        K  [num_blocks, num_kv_heads, head_dim / p, block_size, p]
        V  [num_blocks, num_kv_heads, block_size / p, head_dim, p]

    p neighbours of the summed dimension are adjacent in memory, because the bfloat16 dot-product
    instructions read pairs. In int8 both are `[num_blocks, num_kv_heads, block_size, head_dim + 4]`
    bytes: a head of a block is its numbers in the order above, with p = 2, then `[block_size]`
    float32 scales, one per token.

    On other devices both are `[num_blocks, block_size, num_kv_heads, head_dim]`.
    """
    if device_type != "cpu":
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return shape, shape
    if dtype == torch.int8:
        shape = (num_blocks, num_kv_heads, block_size, head_dim + SCALE_BYTES)
        return shape, shape
    pack = 4 // dtype.itemsize
    return (
        (num_blocks, num_kv_heads, head_dim // pack, block_size, pack),
        (num_blocks, num_kv_heads, block_size // pack, head_dim, pack),
    )


def swap_out(host: Tensor, cache: Tensor, block_pairs: Pairs, staging: Tensor) -> None:
    """Copies whole blocks of all layers to the host, on the current stream, without a wait.

    Blocks are packed into `staging` on the device and cross the bus in large pieces, because many
    small copies reach only a fraction of its speed.

    Args:
        host: `[num_host_blocks, num_pieces, ...]`, pinned where cache is on a GPU; written.
        cache: `[num_pieces, num_blocks, ...]`, as in `copy_cache_blocks`.
        block_pairs: (block of the cache, block of the host).
        staging: `[num_staged, num_pieces, ...]` on the cache's device; overwritten.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    pairs = sorted(block_pairs, key=lambda pair: pair[1])  # neighbours on the host are one copy
    for part in _parts(pairs, staging.shape[0]):
        packed = staging[: len(part)]
        pack_blocks(packed, cache, _upload([block for block, _ in part], cache.device))
        copy_across(packed, host, [(index, target) for index, (_, target) in enumerate(part)])


def swap_in(cache: Tensor, host: Tensor, block_pairs: Pairs, staging: Tensor) -> None:
    """Copies whole blocks of all layers from the host; the opposite of `swap_out`.

    Args:
        block_pairs: (block of the host, block of the cache), each block of the cache at most once.
        cache, host, staging: as in `swap_out`; cache and staging are written.
    """
    pairs = sorted(block_pairs)
    for part in _parts(pairs, staging.shape[0]):
        packed = staging[: len(part)]
        copy_across(host, packed, [(source, index) for index, (source, _) in enumerate(part)])
        unpack_blocks(cache, packed, _upload([block for _, block in part], cache.device))


def _parts(pairs: Pairs, size: int) -> list[Pairs]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


def copy_across(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Copies blocks from one tensor to another, consecutive ones in one copy."""
    for first_source, first_target, count in _runs(pairs):
        target[first_target : first_target + count].copy_(
            source[first_source : first_source + count], non_blocking=True
        )


def _runs(pairs: Pairs) -> list[tuple[int, int, int]]:
    """Returns (source, target, count) of runs in which source and target both go up by one."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs:
            first_source, first_target, count = runs[-1]
            if (source, target) == (first_source + count, first_target + count):
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source, target, 1))
    return runs


def _upload(values: list[int], device: torch.device) -> Tensor:
    pinned = device.type == "cuda"
    host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)
