"""The ops on the KV cache in plain torch, and the plan of decode attention on a GPU.

A KV cache has one of the two layouts of `ops.cache.kv_cache_shapes`: five dimensions (CPU) or four
(CUDA). Only the second may be fp8 (e4m3).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E4M3 = 448.0
CHUNK = 16
"""In tokens; all borders of a plan's items are multiples of it (`kChunk` in csrc)."""


def _bits(tensor: Tensor) -> Tensor:
    """Views fp8 as uint8, because torch cannot index fp8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def gather_pages(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns K and V of these blocks, each `[num_blocks * block_size, num_kv_heads, head_dim]`."""
    k, v = (_bits(cache)[block_ids.long()].view(cache.dtype) for cache in (k_cache, v_cache))
    if k_cache.dim() == 5:
        k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 2, 4, 1, 3)
        num_blocks, block_size, num_kv_heads = k.shape[:3]
        return (
            k.reshape(num_blocks * block_size, num_kv_heads, -1),
            v.reshape(num_blocks * block_size, num_kv_heads, -1),
        )
    return k.flatten(0, 1), v.flatten(0, 1)


def block_size_of(k_cache: Tensor) -> int:
    return k_cache.shape[3] if k_cache.dim() == 5 else k_cache.shape[1]


def _as_cached(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Converts x to the cache's dtype; fp8 saturates at its largest number, and NaN stays NaN."""
    if dtype != torch.float8_e4m3fn:
        return x
    quotient = x.float() * torch.tensor(1.0 / scale, dtype=torch.float32, device=x.device)
    return _bits(quotient.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(dtype))


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    cached = slot_mapping >= 0
    slots = slot_mapping[cached].long()
    k = _as_cached(k[cached], k_cache.dtype, k_scale)
    v = _as_cached(v[cached], v_cache.dtype, v_scale)
    block_size = block_size_of(k_cache)
    block, offset = slots // block_size, slots % block_size
    if k_cache.dim() == 5:
        pack = k_cache.shape[4]
        k_cache.permute(0, 3, 1, 2, 4)[block, offset] = k.unflatten(-1, (-1, pack))
        v_cache.permute(0, 2, 4, 1, 3)[block, offset // pack, offset % pack] = v
    else:
        _bits(k_cache)[block, offset] = k
        _bits(v_cache)[block, offset] = v


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    source, target = block_pairs.unbind(1)
    for cache in (_bits(k_cache), _bits(v_cache)):
        cache[target] = cache[source]


def copy_cache_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    source, target = block_pairs.unbind(1)
    bits = _bits(cache)
    bits[:, target] = bits[:, source]


def pack_blocks(packed: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    _bits(packed).copy_(_bits(cache)[:, block_ids].transpose(0, 1))


def unpack_blocks(cache: Tensor, packed: Tensor, block_ids: Tensor) -> None:
    _bits(cache)[:, block_ids] = _bits(packed).transpose(0, 1)


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
    block_size = block_size_of(k_cache)
    borders = token_start.tolist()
    for seq, first in enumerate(borders[:-1]):
        length = min(borders[seq + 1], k.shape[0]) - first
        if length <= 0:
            continue
        pages = gather_pages(k_cache, v_cache, block_table[seq, : -(-length // block_size)])
        for out, page, scale in zip((k, v), pages, (k_scale, v_scale), strict=True):
            dense = page[:length]
            is_fp8 = dense.dtype == torch.float8_e4m3fn
            out[first : first + length] = dense.float() * scale if is_fp8 else dense


def plan_decode(
    item_start: Tensor, items: Tensor, seq_lens: Tensor, min_tokens: int, sliding_window: int | None
) -> None:
    lengths = seq_lens.tolist()
    window = 2**31 - 1 if sliding_window is None else sliding_window
    first_chunks = [max(0, length - window) // CHUNK for length in lengths]
    chunks = [
        -(-length // CHUNK) - first for length, first in zip(lengths, first_chunks, strict=True)
    ]
    live = [count for count in chunks if count > 0]
    longest = _longest_item(live, (items.shape[0] - len(lengths)) // 2, -(-min_tokens // CHUNK))
    starts, rows = [0], []
    for row, (length, first, total) in enumerate(zip(lengths, first_chunks, chunks, strict=True)):
        count = max(1, -(-total // longest))
        flagged = row - 2**31 if count > 1 else row
        rows += [
            (flagged, first + total * i // count, first + total * (i + 1) // count, length)
            for i in range(count)
        ]
        starts.append(len(rows))
    item_start.copy_(torch.tensor(starts, dtype=torch.int32))
    items[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device=items.device).view(-1, 4)


def _longest_item(chunks: list[int], wave: int, min_chunks: int) -> int:
    """See `longest_item` in csrc/cuda/attention/plan_decode.cuh; all `chunks` are above 0."""
    longest = max([1, *chunks])
    low, high = min(min_chunks, longest), longest
    if len(chunks) >= wave:
        return max(low, -(-sum(chunks) * 5 // (8 * wave)))
    while low < high:
        middle = (low + high) // 2
        if sum(-(-count // middle) for count in chunks) > wave:
            low = middle + 1
        else:
            high = middle
    return low
