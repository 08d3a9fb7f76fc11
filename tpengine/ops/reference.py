"""Every op in plain torch: its contract, the standard for tests of the kernels, and the fallback
without them. `ops.library.op` makes ops of these functions.

A KV cache has a layout of `ops.cache_ops.kv_cache_shapes`: five dimensions (CPU), four in int8
(CPU), or four of another type (CUDA). Only the last may be fp8 (e4m3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_E4M3 = 448.0
SCALE_BYTES = 4
"""Of a token's K or V of one head in int8."""
CHUNK = 16
"""In tokens; all borders of a plan's items are multiples of it (`kChunk` in csrc)."""


def _bits(tensor: Tensor) -> Tensor:
    """Views fp8 as uint8, because torch cannot index fp8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def gather_pages(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns K and V of these blocks, each `[num_blocks * block_size, num_kv_heads, head_dim]`."""
    pages = [_bits(cache)[block_ids.long()].view(cache.dtype) for cache in (k_cache, v_cache)]
    k_view, v_view = _views(*pages)
    k, v = k_view.flatten(3).flatten(0, 1), v_view.flatten(1, 2).flatten(0, 1)
    if k_cache.dtype != torch.int8:
        return k, v
    k_scales, v_scales = (_int8_parts(page)[1].flatten(0, 1)[..., None] for page in pages)
    return k.float() * k_scales, v.float() * v_scales


def _views(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of the numbers of both caches, in every layout: K `[num_blocks, block_size,
    num_kv_heads, head_dim / p, p]`, and V `[num_blocks, block_size / p, p, num_kv_heads,
    head_dim]`."""
    if k_cache.dim() == 4 and k_cache.dtype != torch.int8:
        return k_cache.unsqueeze(4), v_cache.unsqueeze(2)
    if k_cache.dtype == torch.int8:
        k_numbers, v_numbers = _int8_parts(k_cache)[0], _int8_parts(v_cache)[0]
        head_dim, block_size = k_cache.shape[3] - SCALE_BYTES, k_cache.shape[2]
        k_cache = k_numbers.unflatten(2, (head_dim // 2, block_size, 2))
        v_cache = v_numbers.unflatten(2, (block_size // 2, head_dim, 2))
    return k_cache.permute(0, 3, 1, 2, 4), v_cache.permute(0, 2, 4, 1, 3)


def _int8_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of an int8 cache: its numbers, `[num_blocks, num_kv_heads, block_size *
    head_dim]`, and its scales, `[num_blocks, block_size, num_kv_heads]`."""
    block_size, head_dim = cache.shape[2], cache.shape[3] - SCALE_BYTES
    sizes = [block_size * head_dim, block_size * SCALE_BYTES]
    numbers, scales = cache.flatten(2).split(sizes, dim=2)
    return numbers, scales.view(torch.float32).transpose(1, 2)


def _block_size(k_cache: Tensor) -> int:
    return _views(k_cache, k_cache)[0].shape[1]


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds `[..., head_dim]` to int8 with a scale for each `[...]`."""
    x = x.float()
    largest = x.abs().amax(-1)
    is_sound = x.isfinite().all(-1)
    # Python's `127.0 / largest` would be the reciprocal times 127, which is rounded twice.
    inverse = torch.where(largest > 1e-30, largest.new_tensor(127.0) / largest, 0.0)
    numbers = torch.where(is_sound[..., None], x * inverse[..., None], 0.0).round()
    return numbers.to(torch.int8), torch.where(is_sound, largest / 127.0, float("nan"))


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
    cached = slot_mapping >= 0
    slots = slot_mapping[cached].long()
    k_view, v_view = _views(_bits(k_cache), _bits(v_cache))
    block_size, pack = k_view.shape[1], k_view.shape[4]
    block, offset = slots // block_size, slots % block_size
    if k_cache.dtype == torch.int8:
        k, _int8_parts(k_cache)[1][block, offset] = to_int8(k[cached])
        v, _int8_parts(v_cache)[1][block, offset] = to_int8(v[cached])
    else:
        k = _as_cached(k[cached], k_cache.dtype, k_scale)
        v = _as_cached(v[cached], v_cache.dtype, v_scale)
    k_view[block, offset] = k.unflatten(-1, (-1, pack))
    v_view[block, offset // pack, offset % pack] = v


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    """Copies whole blocks within one layer's caches.

    Args:
        k_cache, v_cache: shaped by `kv_cache_shapes`; written.
        block_pairs: int64 `[num_pairs, 2]` of (source, target). A block must not be a target twice,
            nor a source and a target, because the order of the copies is not defined.

    Raises:
        RuntimeError: a dtype or shape does not fit, or a block is out of range.
    """
    source, target = block_pairs.unbind(1)
    for cache in (_bits(k_cache), _bits(v_cache)):
        cache[target] = cache[source]


def copy_cache_blocks(cache: Tensor, block_pairs: Tensor) -> None:
    """Copies whole blocks of all layers; on a GPU in one kernel launch.

    Args:
        cache: `[num_pieces, num_blocks, ...]`, contiguous from the second dimension on: every
            layer's K and V, allocated as one tensor; written.
        block_pairs: as in `copy_blocks`.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    source, target = block_pairs.unbind(1)
    bits = _bits(cache)
    bits[:, target] = bits[:, source]


def pack_blocks(packed: Tensor, cache: Tensor, block_ids: Tensor) -> None:
    """Gathers whole blocks, so that all pieces of a block are adjacent in memory.

    Args:
        packed: `[num_ids, num_pieces, ...]`, written.
        cache: as in `copy_cache_blocks`.
        block_ids: int64 `[num_ids]`.

    Raises:
        RuntimeError: a dtype or shape does not fit.
    """
    _bits(packed).copy_(_bits(cache)[:, block_ids].transpose(0, 1))


def unpack_blocks(cache: Tensor, packed: Tensor, block_ids: Tensor) -> None:
    """Scatters what `pack_blocks` has gathered; arguments as there, with distinct block ids."""
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
    block_size = _block_size(k_cache)
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


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    first, second = heads[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
    a, b = first.float(), second.float()  # views of heads if these are float32
    rotated = a * cos - b * sin, b * cos + a * sin
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def rotary_write_kv_cache(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotary position embedding (Su et al. 2021) on packed qkv in place, computed in float32, then
    `write_kv_cache`, in one pass. Dimension i is paired with i + rotary_dim / 2 (GPT-NeoX, Llama).

    Args:
        positions: int32 `[num_tokens]`.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; q and k are rotated. A row
            whose slot is -1 is rotated and not cached.
        cos_sin_cache: float32 `[max_position, rotary_dim]`: the rotary_dim / 2 cosines of each
            position, then its sines. rotary_dim is even and at most head_dim; the rest of a head
            stays as it is.
        slot_mapping, k_cache, v_cache, k_scale, v_scale: as in `write_kv_cache`.

    Raises:
        RuntimeError: as `write_kv_cache`, or a position has no row.
    """
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, dim=-1)
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    _rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
    k, v = heads[:, num_heads:].chunk(2, dim=1)
    write_kv_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    alibi_slopes: Tensor | None,
    sliding_window: int | None,
    softcap: float | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last `len(q)` positions of a sequence, computed in float32.

    Args:
        q: `[num_queries, num_heads, head_dim]`, any float dtype.
        k, v: `[seq_len, num_kv_heads, head_dim]`, any float dtype.
        key_ends: see `prefill_attention`.

    Returns:
        float32 `[num_queries, num_heads, head_dim]`.
    """
    num_queries, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    k = k.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    key = torch.arange(length, device=q.device)
    query = key[length - num_queries :]
    distance = key[None, :] - query[:, None]
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if alibi_slopes is not None:
        logits = logits + alibi_slopes[:, None, None] * distance
    hidden = distance > 0 if key_ends is None else key >= key_ends[:, None]
    if sliding_window is not None:
        hidden = hidden | (distance <= -sliding_window)
    logits = logits.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(logits, dim=-1), v)


def prefill_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    key_ends: Tensor | None = None,
) -> None:
    """Prefill: ragged chunks of queries, each causal over its sequence's whole cached context.

    The queries `query_start_loc[i]` to `query_start_loc[i + 1]` are the last tokens of sequence i;
    their own K and V are in the cache already.

    Args:
        out, q: `[num_tokens, num_heads, head_dim]`; rows outside all sequences are not read or
            written.
        query_start_loc: int32 `[num_seqs + 1]`, in ascending order.
        seq_lens: int32 `[num_seqs]`, cached context and the chunk together.
        key_ends: int32 `[num_tokens]`, the position behind the last key that a query sees, for
            queries that see later tokens of their chunk; in ascending order in each sequence. A
            sliding window begins where it would without. None: each query sees itself last.
        block_table and the others: as in `paged_attention`, with the same limits and guarantees; a
            token's result also does not depend on how its prompt was divided into chunks.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit. Block ids are not checked.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    block_size = _block_size(k_cache)
    for seq, length in enumerate(lengths):
        rows = slice(starts[seq], starts[seq + 1])
        if length == 0:
            out[rows].zero_()
        elif rows.stop > rows.start:
            blocks = block_table[seq, : -(-length // block_size)]
            k, v = gather_pages(k_cache, v_cache, blocks)
            k, v = k[:length].float() * k_scale, v[:length].float() * v_scale
            ends = None if key_ends is None else key_ends[rows]
            out[rows] = attend_sequence(
                q[rows], k, v, scale, alibi_slopes, sliding_window, softcap, ends
            )


def paged_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    item_start: Tensor | None = None,
    items: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Decode: the last token of each sequence attends to the whole sequence.

    PagedAttention (Kwon et al. 2023) with the online softmax of Milakov and Gimelshein (2018);
    ALiBi as in Press et al. (2022), sliding window as in Mistral (Jiang et al. 2023).

    Args:
        out: `[num_seqs, num_heads, head_dim]`, written; zeros for a sequence of length 0.
        q: `[num_seqs, num_heads, head_dim]`; any strides, last dimension contiguous.
        k_cache, v_cache: of one layer, shaped by `ops.cache_ops.kv_cache_shapes`; dtype of q, or
            int8 on a CPU, or float8_e4m3fn on a GPU. Slots beyond a sequence's length may hold any
            value, even NaN.
        block_table: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are ignored.
        seq_lens: int32 `[num_seqs]`, tokens including the one whose query this is.
        scale: factor on the products of q and k.
        alibi_slopes: float32 `[num_heads]`; adds `slope * (key - query)` (positions) to the logits.
        sliding_window: a query sees this many keys, itself included; None: all of them.
        softcap: logits become `softcap * tanh(logit / softcap)` (Gemma 2) before slopes are added;
            None: they stay.
        k_scale, v_scale: factors on the values of an fp8 cache.
        item_start, items, partials: a `DecodePlan` of the same seq_lens and window; None: one block
            of threads per sequence and kv head, which is slow for few long sequences. CPU kernels
            do not use it.

    Block sizes 8, 16 and 32. On CPU: float32 and bfloat16, head_dim a multiple of 16 up to 256; a
    sequence's result does not depend on the other sequences nor on the number of threads. On CUDA:
    float32, float16, bfloat16, head_dim up to 256 (`check_decode_support`); products of 16-bit
    numbers are summed in float32, and fp8 numbers are 16-bit ones before they are multiplied. On
    CPU the numbers of an int8 cache are converted to the dtype of the queries, which is exact. A
    key's scale multiplies its score, a value's scale its probability.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit. Block ids are not checked.
    """
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    prefill_attention(
        out, q, k_cache, v_cache, block_table, starts, seq_lens, scale, alibi_slopes,
        sliding_window, softcap, k_scale, v_scale,
    )  # fmt: skip


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    Normalised in float32, rounded to the weight's dtype, then multiplied by the weight, as Hugging
    Face's models do: Llama's weights have x's dtype, Gemma's `1 + weight` is float32.

    Args:
        out: shape and dtype of x, written; may be x itself.
        x: `[num_tokens, size]` or `[num_tokens, num_heads, size]` (norm per head); float32 or
            bfloat16; any strides, last dimension contiguous.
        weight: `[size]`, dtype of x or float32.
        eps: added to the mean square.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    out.copy_(y.to(weight.dtype) * weight)


def add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """`residual += x` (rounded to its dtype), then `out = rms_norm(residual) * weight`.

    Args:
        out: `[num_tokens, size]`, written; may be x itself.
        x, residual: `[num_tokens, size]`, one dtype; residual is written.
        weight: `[size]`.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def layer_norm(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """Layer normalisation (Ba et al. 2016) over the last dimension, computed in float32 and rounded
    once.

    Args:
        out: shape and dtype of x, written; may be x itself.
        x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided.
        weight, bias: `[size]`, dtype of x; None: ones, zeros.
        eps: added to the variance.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    out.copy_(F.layer_norm(x, x.shape[-1:], weight, bias, eps))


def add_layer_norm(
    out: Tensor, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """`residual += x` (rounded to its dtype), then `layer_norm` of it into `out`.

    Args:
        out: `[num_tokens, size]`, written; may be x itself.
        x, residual: `[num_tokens, size]`, one dtype; residual is written.
        weight, bias: `[size]`; None: ones, zeros.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    residual.add_(x)
    layer_norm(out, residual, weight, bias, eps)


def accumulate(total: Tensor, x: Tensor) -> None:
    """`total += x`, rounded to its dtype.

    Args:
        total, x: `[num_tokens, size]`, contiguous, float32 or bfloat16; total is written.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    total.add_(x)


def add_gated(total: Tensor, x: Tensor, gate: Tensor) -> None:
    """`total += sigmoid(gate) * x`, computed in float32 and rounded once.

    Args:
        total, x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided; total is written.
        gate: `[num_tokens, 1]`, same dtype.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    total.add_(gate.float().sigmoid() * x.float())


def relu(x: Tensor) -> None:
    """`max(x, 0)` in place.

    Args:
        x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided.

    Raises:
        RuntimeError: its dtype, shape or strides do not fit.
    """
    x.relu_()


def silu(x: Tensor) -> None:
    """`x / (1 + exp(-x))` in place; see `relu`."""
    F.silu(x, inplace=True)


def gelu(x: Tensor) -> None:
    """The exact GELU (by the error function) in place; see `relu`."""
    torch.ops.aten.gelu_.default(x)


def gelu_tanh(x: Tensor) -> None:
    """GELU's tanh approximation in place; see `relu`."""
    torch.ops.aten.gelu_.default(x, approximate="tanh")


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """SwiGLU's product (Shazeer 2020): `out = silu(gate) * up`.

    Args:
        out: `[num_tokens, n]`, written.
        x: `[num_tokens, 2 * n]`, gate first, then up; float32 or bfloat16, same dtype as out.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """`out = gelu(gate) * up` with the exact GELU (by the error function); see `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.gelu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """`out = gelu(gate) * up` with GELU's tanh approximation; see `silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def local_rows(token_ids: Tensor, num_rows: int, first: int | None) -> tuple[Tensor, Tensor | None]:
    """Returns the table's row of each id, and bool `[num_tokens, 1]`, which ids have none (their
    row is 0); None: every id must have one. See `embedding`."""
    if first is None:
        return token_ids, None
    rows = token_ids - first
    absent = (rows < 0) | (rows >= num_rows)
    return rows.masked_fill(absent, 0), absent.unsqueeze(1)


def embedding(
    out: Tensor, table: Tensor, token_ids: Tensor, scale: float = 1.0, first: int | None = None
) -> None:
    """`out[i] = table[token_ids[i]] * scale`, rounded to out's dtype.

    Args:
        out: `[num_tokens, size]`, written.
        table: `[num_rows, size]`, float32 or bfloat16, same dtype as out.
        token_ids: int32 `[num_tokens]`.
        first: id of the table's first row, if it is a part of a table; ids of other parts give
            zeros. None: it is the whole table.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit, or an id has no row in the
            whole table.
    """
    rows, absent = local_rows(token_ids, len(table), first)
    torch.index_select(table, 0, rows, out=out)
    if scale != 1.0:
        out.mul_(scale)
    if absent is not None:
        out.masked_fill_(absent, 0)


def argmax(out: Tensor, logits: Tensor, logprobs: Tensor | None = None) -> None:
    """Token of the largest logit of each row; of equal logits the lowest id.

    Args:
        out: int64 `[rows]`, written.
        logits: `[rows, vocab]`, float32 or bfloat16. A row that holds NaN gives its first NaN.
        logprobs: float32 `[rows]`, written: log probability of the chosen token in the softmax of
            the logits; NaN where the largest logit is not finite. None: not wanted.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    out.copy_(logits.float().argmax(-1))
    _write_logprobs(logprobs, logits, out)


def _write_logprobs(logprobs: Tensor | None, logits: Tensor, token_ids: Tensor) -> None:
    if logprobs is not None:
        shares = logits.float().log_softmax(-1)
        logprobs.copy_(shares.gather(-1, token_ids[:, None])[:, 0])


def filtered_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Unnormalised probabilities after every filter, float64 `[rows, vocab]`; 0 for dropped tokens.

    Rows must have a finite largest logit and a temperature above 0.
    """
    vocab_size = logits.shape[-1]
    scaled = logits.float() - logits.float().amax(-1, keepdim=True)
    scaled = scaled * (1.0 / temperature).clamp(max=1e30)[:, None]
    scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)  # ties: lowest ids first
    weights = scaled.double().exp().masked_fill(scaled < -87.0, 0.0)
    rank = torch.arange(vocab_size, device=logits.device)
    k = torch.where(top_k > 0, top_k, vocab_size)
    weights = weights.masked_fill(rank >= k[:, None], 0.0)
    mass_before = weights.cumsum(-1) - weights
    reached = mass_before >= top_p.double()[:, None] * weights.sum(-1, keepdim=True)
    weights = weights.masked_fill(reached & (top_p < 1.0)[:, None] & (rank > 0), 0.0)
    weights = weights.masked_fill((weights < min_p.double()[:, None]) & (rank > 0), 0.0)
    return torch.zeros_like(weights).scatter_(-1, ids, weights)


def sample_tokens(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    logprobs: Tensor | None = None,
) -> None:
    """Samples one token per row: temperature, top-k, top-p, min-p, then one uniform number.

    The probabilities of the kept tokens are summed in the order of their ids, and the token whose
    part of the sum contains `uniform` is chosen. So a row's token is a function of that row alone.

    Args:
        out: int64 `[rows]`, written.
        logits: `[rows, vocab]`, float32 or bfloat16; minus infinity bans a token.
        temperature: float32 `[rows]`; 0 is argmax.
        top_k: int32 `[rows]`; 0 is off. Of logits equal to the k-th largest, the lowest ids
            are kept, so that exactly k tokens remain.
        top_p: float32 `[rows]`; 1 is off. Keeps the smallest set of most probable tokens whose
            mass reaches top_p of the mass that top-k has kept (Holtzman et al. 2020). The token
            that crosses it is kept, and at least one token; of equal tokens the highest ids are
            dropped first.
        min_p: float32 `[rows]`; 0 is off. Keeps tokens at least min_p times as probable as the most
            probable one.
        uniform: float64 `[rows]` in [0, 1).
        logprobs: see `argmax`; temperature and filters do not change them.

    A row whose largest logit is not finite (NaN, infinity, all tokens banned) gives its argmax.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    argmax(out, logits)
    rows = torch.where((temperature > 0) & logits.float().amax(-1).isfinite())[0]
    filters = (column[rows] for column in (temperature, top_k, top_p, min_p))
    weights = filtered_weights(logits[rows], *filters)
    running = weights.cumsum(-1)
    target = uniform[rows, None] * running[:, -1:]
    token = torch.searchsorted(running, target, right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    out[rows] = torch.minimum(token, last)
    _write_logprobs(logprobs, logits, out)
