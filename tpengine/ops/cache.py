"""The KV cache: its layout on each device, writing tokens into slots, copying blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)

_write_kv_cache = torch.ops.tpengine.write_kv_cache.default
_rotary_write_kv_cache = torch.ops.tpengine.rotary_write_kv_cache.default
_copy_blocks = torch.ops.tpengine.copy_blocks.default

Shape = tuple[int, ...]


def kv_cache_shapes(
    device_type: str,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Shape, Shape]:
    """Shapes of the K and the V cache of one layer.

    On CPU, with p = 2 for 16-bit types and 1 for float32: K
    `[num_blocks, num_kv_heads, head_dim / p, block_size, p]`, V
    `[num_blocks, num_kv_heads, block_size / p, head_dim, p]` (pairs of the summed dimension lie
    side by side, as bfloat16 dot-product instructions read them). On other devices both are
    `[num_blocks, block_size, num_kv_heads, head_dim]`.
    """
    if device_type != "cpu":
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return shape, shape
    pack = 4 // dtype.itemsize
    return (
        (num_blocks, num_kv_heads, head_dim // pack, block_size, pack),
        (num_blocks, num_kv_heads, block_size // pack, head_dim, pack),
    )


def write_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes each token's K and V into its slot.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`; views with any strides whose last dimension
            is contiguous (parts of a packed qkv).
        k_cache, v_cache: shaped by `kv_cache_shapes`, same dtype as k; written.
        slot_mapping: int32 `[num_tokens]`, block * block_size + offset; -1 writes nowhere.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit, or a slot is out of range.
    """
    _write_kv_cache(k, v, k_cache, v_cache, slot_mapping)


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
) -> None:
    """`rotary_embedding` on packed qkv in place, then `write_kv_cache`, in one pass.

    Args:
        positions: int32 `[num_tokens]`.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; q and k are rotated. A row
            whose slot is -1 is rotated and not cached.
        cos_sin_cache: float32 `[max_position, rotary_dim]`.
        slot_mapping, k_cache, v_cache: as in `write_kv_cache`.

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
    )


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    """Copies whole blocks within one layer's caches.

    Args:
        k_cache, v_cache: shaped by `kv_cache_shapes`; written.
        block_pairs: int64 `[num_pairs, 2]` of (source, target). No block may be a target twice, nor
            both source and target: pairs are copied in any order.

    Raises:
        RuntimeError: a dtype or shape does not fit, or a block is out of range.
    """
    _copy_blocks(k_cache, v_cache, block_pairs)
