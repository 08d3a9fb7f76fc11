"""The KV cache: its layout on each device, writes of tokens into slots, copies of blocks.

`kv_cache_shapes` decides the layout, for CPUs and for GPUs; the kernels in `csrc/cpu` and
`csrc/cuda` read and write it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)
from tpengine.ops.reference import SCALE_BYTES

_write_kv_cache = torch.ops.tpengine.write_kv_cache.default
_rotary_write_kv_cache = torch.ops.tpengine.rotary_write_kv_cache.default
_copy_blocks = torch.ops.tpengine.copy_blocks.default
_copy_cache_blocks = torch.ops.tpengine.copy_cache_blocks.default
_pack_blocks = torch.ops.tpengine.pack_blocks.default
_unpack_blocks = torch.ops.tpengine.unpack_blocks.default
_gather_kv = torch.ops.tpengine.gather_kv.default

Shape = tuple[int, ...]


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


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes each token's K and V into its slot.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`; views with any strides whose last dimension
            is contiguous (parts of a packed qkv).
        k_cache, v_cache: shaped by `kv_cache_shapes`, same dtype as k, or on a CPU int8, or on a
            GPU float8_e4m3fn for 16-bit k; written. In int8 each token and head has its own scale,
            its largest magnitude / 127; the scale is NaN if a number is not finite.
        slot_mapping: int32 `[num_tokens]`, block * block_size + offset; -1: not written.
        k_scale, v_scale: an fp8 cache holds k / k_scale and v / v_scale, saturated at 448.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit, or (on CPU) a slot is out of
            range.
    """
    _write_kv_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def rotary_write_kv_cache(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    is_neox: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`rotary_embedding` on packed qkv in place, then `write_kv_cache`, in one pass.

    Args:
        positions: int32 `[num_tokens]`.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; q and k are rotated. A row
            whose slot is -1 is rotated and not cached.
        cos_sin_cache: float32 `[max_position, rotary_dim]`.
        slot_mapping, k_cache, v_cache, k_scale, v_scale: as in `write_kv_cache`.

    Raises:
        RuntimeError: as `rotary_embedding` and `write_kv_cache`.
    """
    _rotary_write_kv_cache(
        positions,
        qkv,
        cos_sin_cache,
        slot_mapping,
        k_cache,
        v_cache,
        num_heads,
        num_kv_heads,
        is_neox,
        k_scale,
        v_scale,
    )


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    """Copies whole blocks within one layer's caches.

    Args:
        k_cache, v_cache: shaped by `kv_cache_shapes`; written.
        block_pairs: int64 `[num_pairs, 2]` of (source, target). A block must not be a target twice,
            nor a source and a target, because the order of the copies is not defined.

    Raises:
        RuntimeError: a dtype or shape does not fit, or a block is out of range.
    """
    _copy_blocks(k_cache, v_cache, block_pairs)


def copy_cache_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """Copies whole blocks of all layers; on a GPU in one kernel launch.

    Args:
        cache: `[num_pieces, num_blocks, ...]`, contiguous from the second dimension on: every
            layer's K and V, allocated as one tensor; written.
        block_pairs: as in `copy_blocks`.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    _copy_cache_blocks(cache, block_pairs)


def pack_blocks(packed: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Gathers whole blocks, so that all pieces of a block are adjacent in memory.

    Args:
        packed: `[num_ids, num_pieces, ...]`, written.
        cache: as in `copy_cache_blocks`.
        block_ids: int64 `[num_ids]`.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    _pack_blocks(packed, cache, block_ids)


def unpack_blocks(cache: Tensor, packed: Tensor, block_ids: Tensor) -> None:
    """Scatters what `pack_blocks` has gathered; arguments as there, with distinct block ids."""
    _unpack_blocks(cache, packed, block_ids)


def swap_out(
    host: Tensor, cache: Tensor, block_pairs: list[tuple[int, int]], staging: Tensor
) -> None:
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
        for first, target, count in _runs([target for _, target in part]):
            host[target : target + count].copy_(packed[first : first + count], non_blocking=True)


def swap_in(
    cache: Tensor, host: Tensor, block_pairs: list[tuple[int, int]], staging: Tensor
) -> None:
    """Copies whole blocks of all layers from the host; the opposite of `swap_out`.

    Args:
        block_pairs: (block of the host, block of the cache), each block of the cache at most once.
        cache, host, staging: as in `swap_out`; cache and staging are written.
    """
    pairs = sorted(block_pairs)
    for part in _parts(pairs, staging.shape[0]):
        packed = staging[: len(part)]
        for first, source, count in _runs([source for source, _ in part]):
            packed[first : first + count].copy_(host[source : source + count], non_blocking=True)
        unpack_blocks(cache, packed, _upload([block for _, block in part], cache.device))


def _parts(pairs: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


def _runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """Finds runs of consecutive block ids; each is (index, first block, count)."""
    runs: list[tuple[int, int, int]] = []
    for index, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            first, start, count = runs[-1]
            runs[-1] = (first, start, count + 1)
        else:
            runs.append((index, block, 1))
    return runs


def _upload(values: list[int], device: torch.device) -> Tensor:
    pinned = device.type == "cuda"
    host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=True)


def gather_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    token_start: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Gathers the K and V of sequences from their blocks, for kernels without paged attention.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`, contiguous; written, in the model's dtype.
            Rows from `token_start[-1]` on are not written.
        k_cache, v_cache: as in `write_kv_cache`.
        block_table: int32 `[num_seqs, max_blocks]`.
        token_start: int32 `[num_seqs + 1]`, first row of each sequence in k and v: the running sum
            of the lengths, from 0.
        k_scale, v_scale: factors on the values of an fp8 cache.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    _gather_kv(k, v, k_cache, v_cache, block_table, token_start, k_scale, v_scale)
