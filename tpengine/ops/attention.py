"""Attention over the paged KV cache: one query per sequence, or ragged chunks of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)

_paged_attention = torch.ops.tpengine.paged_attention.default
_prefill_attention = torch.ops.tpengine.prefill_attention.default


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
) -> None:
    """Decode: the last token of each sequence attends to the whole sequence.

    PagedAttention (Kwon et al. 2023) with the online softmax of Milakov and Gimelshein (2018);
    ALiBi as in Press et al. (2022), sliding window as in Mistral (Jiang et al. 2023).

    Args:
        out: `[num_seqs, num_heads, head_dim]`, written; zeros for a sequence of length 0.
        q: `[num_seqs, num_heads, head_dim]`; any strides, last dimension contiguous.
        k_cache, v_cache: of one layer, shaped by `ops.cache.kv_cache_shapes`; dtype of q. Slots
            beyond a sequence's length may hold anything, NaN included.
        block_table: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are ignored.
        seq_lens: int32 `[num_seqs]`, tokens including the one whose query this is.
        scale: factor on the logits.
        alibi_slopes: float32 `[num_heads]`; adds `slope * (key - query)` (positions) to the logits.
        sliding_window: a query sees this many keys, itself included; None: all of them.

    On CPU: float32 and bfloat16, head_dim a multiple of 16 up to 256, block sizes 8, 16 and 32. A
    sequence's result does not depend on the other sequences nor on the number of threads.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit. Block ids are not checked.
    """
    _paged_attention(
        out, q, k_cache, v_cache, block_table, seq_lens, scale, alibi_slopes, sliding_window
    )


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
) -> None:
    """Prefill: ragged chunks of queries, each causal over its sequence's whole cached context.

    The queries `query_start_loc[i]` to `query_start_loc[i + 1]` are the last tokens of sequence i;
    their own K and V are in the cache already.

    Args:
        out, q: `[num_tokens, num_heads, head_dim]`; rows of no sequence are neither read nor
            written.
        query_start_loc: int32 `[num_seqs + 1]`, not decreasing.
        seq_lens: int32 `[num_seqs]`, cached context and the chunk together.
        block_table and the others: as in `paged_attention`, with the same limits and guarantees; a
            token's result does not depend on how its prompt was cut into chunks either.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit. Block ids are not checked.
    """
    _prefill_attention(
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
