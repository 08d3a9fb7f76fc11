"""Every op in plain torch: what the kernels are held against, and what runs where there is none.

KV caches may have either layout of `ops.cache.kv_cache_shapes`: five dimensions (CPU) or four
(CUDA).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR_PANEL = 32
"""Outputs that lie side by side in a packed weight (`kLinearPanel` in csrc)."""


def gather_kv(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Dense K and V `[num_blocks * block_size, num_kv_heads, head_dim]` of the named blocks."""
    k, v = k_cache[block_ids.long()], v_cache[block_ids.long()]
    if k_cache.dim() == 5:
        k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 2, 4, 1, 3)
        num_blocks, block_size, num_kv_heads = k.shape[:3]
        return (
            k.reshape(num_blocks * block_size, num_kv_heads, -1),
            v.reshape(num_blocks * block_size, num_kv_heads, -1),
        )
    return k.flatten(0, 1), v.flatten(0, 1)


def _block_size(k_cache: Tensor) -> int:
    return k_cache.shape[3] if k_cache.dim() == 5 else k_cache.shape[1]


def write_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    cached = slot_mapping >= 0
    slots, k, v = slot_mapping[cached].long(), k[cached], v[cached]
    block_size = _block_size(k_cache)
    block, offset = slots // block_size, slots % block_size
    if k_cache.dim() == 5:
        pack = k_cache.shape[4]
        k_cache.permute(0, 3, 1, 2, 4)[block, offset] = k.unflatten(-1, (-1, pack))
        v_cache.permute(0, 2, 4, 1, 3)[block, offset // pack, offset % pack] = v
    else:
        k_cache[block, offset] = k
        v_cache[block, offset] = v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> None:
    head = x[..., : 2 * cos.shape[-1]]
    if is_neox:
        first, second = head.chunk(2, dim=-1)
    else:
        first, second = head[..., 0::2], head[..., 1::2]
    a, b = first.float(), second.float()  # views of x where that is float32 already
    rotated = a * cos - b * sin, b * cos + a * sin
    first.copy_(rotated[0])
    second.copy_(rotated[1])


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, dim=-1)
    _rotate(q, cos, sin, is_neox)
    _rotate(k, cos, sin, is_neox)


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
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotary_embedding(positions, q, k, cos_sin_cache, is_neox)
    write_kv_cache(k, v, k_cache, v_cache, slot_mapping)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    source, target = block_pairs.unbind(1)
    k_cache[target] = k_cache[source]
    v_cache[target] = v_cache[source]


def _attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    alibi_slopes: Tensor | None,
    sliding_window: int | None,
) -> Tensor:
    """Causal attention of the last `len(q)` positions of a sequence; float32.

    q `[num_queries, num_heads, head_dim]`, k and v `[seq_len, num_kv_heads, head_dim]`.
    """
    num_queries, num_heads, _ = q.shape
    length, num_kv_heads, _ = k.shape
    k = k.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.float().repeat_interleave(num_heads // num_kv_heads, dim=1)
    key = torch.arange(length, device=q.device)
    query = key[length - num_queries :]
    distance = key[None, :] - query[:, None]
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if alibi_slopes is not None:
        logits = logits + alibi_slopes[:, None, None] * distance
    hidden = distance > 0
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
    alibi_slopes: Tensor | None,
    sliding_window: int | None,
) -> None:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    block_size = _block_size(k_cache)
    for seq, length in enumerate(lengths):
        rows = slice(starts[seq], starts[seq + 1])
        if length == 0:
            out[rows].zero_()
        elif rows.stop > rows.start:
            blocks = block_table[seq, : -(-length // block_size)]
            k, v = gather_kv(k_cache, v_cache, blocks)
            out[rows] = _attend_sequence(
                q[rows], k[:length], v[:length], scale, alibi_slopes, sliding_window
            ).to(out.dtype)


def paged_attention(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    alibi_slopes: Tensor | None,
    sliding_window: int | None,
) -> None:
    query_start_loc = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    prefill_attention(
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        scale,
        alibi_slopes,
        sliding_window,
    )


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    out.copy_(y.to(x.dtype) * weight)


def add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.add_(x)
    rms_norm(out, residual, weight, eps)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.gelu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def argmax(out: Tensor, logits: Tensor) -> None:
    out.copy_(logits.float().argmax(-1))


def filtered_weights(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Unnormalised probabilities float64 `[rows, vocab]` after every filter; 0 where filtered.

    For rows whose largest logit is finite and whose temperature is not 0.
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
) -> None:
    greedy = (temperature == 0) | ~logits.float().amax(-1).isfinite()
    argmax(out, logits)
    rows = (~greedy).nonzero()[:, 0]
    if rows.numel() == 0:
        return
    weights = filtered_weights(
        logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows]
    )
    running = weights.cumsum(-1)
    target = uniform[rows, None] * running[:, -1:]
    token = torch.searchsorted(running, target, right=True)[:, 0]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    out[rows] = torch.minimum(token, last)


def pack_linear_weight(packed: Tensor, weight: Tensor) -> None:
    """See `ops.linear.pack_linear_weight`."""
    outputs, inputs = weight.shape
    pack = 4 // weight.dtype.itemsize
    panels = -(-outputs // LINEAR_PANEL)
    padded = weight.new_zeros(panels * LINEAR_PANEL, inputs)
    padded[:outputs] = weight
    tiles = padded.view(panels, LINEAR_PANEL, inputs // pack, pack).transpose(1, 2)
    packed.copy_(tiles.reshape(-1))


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None) -> None:
    """See `ops.linear.packed_linear`."""
    pack, inputs, outputs = 4 // x.dtype.itemsize, x.shape[1], out.shape[1]
    tiles = packed.view(-1, inputs // pack, LINEAR_PANEL, pack).transpose(1, 2)
    weight = tiles.reshape(-1, inputs)[:outputs]
    result = x.float() @ weight.float().t()
    out.copy_(result if bias is None else result + bias.float())


def int8_linear(
    out: Tensor,
    x: Tensor,
    packed: Tensor,
    weight_scales: Tensor,
    weight_sums: Tensor,
    bias: Tensor | None,
) -> None:
    """See `ops.linear.int8_linear`. `weight_sums` serves the kernels' unsigned inputs only."""
    inputs, outputs = x.shape[1], out.shape[1]
    tiles = packed.view(-1, inputs // 4, LINEAR_PANEL, 4).transpose(1, 2)
    weight = tiles.reshape(-1, inputs)[:outputs]
    largest = x.float().abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    q = (x.float() * inverse).round()
    sums = q.double() @ weight.double().t()  # exact: far below 2^53
    result = sums.float() * (largest / 127.0 * weight_scales)
    out.copy_(result if bias is None else result + bias.float())
