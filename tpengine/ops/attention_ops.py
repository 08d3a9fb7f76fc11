"""Attention over the paged KV cache: one query per sequence, or ragged chunks of queries."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.ops import library

_logger = init_logger(__name__)
_plan_decode = torch.ops.tpengine.plan_decode.default
_paged_attention = torch.ops.tpengine.paged_attention.default
_prefill_attention = torch.ops.tpengine.prefill_attention.default


MAX_HEAD_DIM = 256
TENSOR_CORE_HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""Head dims that the CUDA decode kernel for 16-bit and fp8 caches is compiled for."""
BLOCK_SIZES = (8, 16, 32)
MIN_ITEM_BYTES = 128 * 1024
"""Bytes of K and V of one kv head from which on a part of a context gets its own work item (256
tokens of a bf16 cache with head dim 128)."""
_PARTIAL_PADDING = 4
_FP8_CAPABILITY = (8, 9)
"""First compute capability on which the kernels can convert fp8 numbers."""


@functools.cache
def check_decode_support(
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    capability: tuple[int, int],
) -> None:
    """Checks at start-up that the CUDA decode kernels support a model's attention.

    A head dim without a tensor-core kernel runs on the CUDA cores, with one warning.

    Args:
        capability: compute capability of the GPU.

    Raises:
        ConfigError: they do not; the message says what to change.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size={block_size}: on a GPU it must be 8, 16 or 32")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={dtype}: the CUDA kernels take float16, bfloat16 and float32")
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim={head_dim}: the CUDA attention kernels go up to {MAX_HEAD_DIM}; "
            "run this model on CPU"
        )
    is_fp8 = cache_dtype == torch.float8_e4m3fn
    if not is_fp8 and cache_dtype != dtype:
        raise ConfigError(
            f"a KV cache of {cache_dtype} for a model in {dtype}: the cache takes the model's "
            "dtype, or fp8 (float8_e4m3fn)"
        )
    if is_fp8 and dtype == torch.float32:
        raise ConfigError("an fp8 KV cache needs dtype bfloat16 or float16; this model is float32")
    if is_fp8 and capability < _FP8_CAPABILITY:
        raise ConfigError(
            "an fp8 KV cache on a GPU of compute capability {}.{}: the conversion of its numbers "
            "needs {}.{} or later; set kv_cache_dtype='auto'".format(*capability, *_FP8_CAPABILITY)
        )
    if dtype == torch.float32 or head_dim in TENSOR_CORE_HEAD_DIMS:
        return
    dims = ", ".join(map(str, TENSOR_CORE_HEAD_DIMS))
    if is_fp8:
        raise ConfigError(
            f"head_dim={head_dim} with an fp8 KV cache: it needs one of {dims}; keep the cache in "
            f"{dtype}"
        )
    _logger.warning(
        "head_dim=%d has no tensor-core attention kernel (%s have): decode attention takes the "
        "slower path",
        head_dim,
        dims,
    )


class DecodePlan(NamedTuple):
    """How decode attention on a GPU divides a batch into work items.

    A plan is computed once per step, for all layers with the same window and shape.

    Attributes:
        item_start: int32 `[num_seqs + 1]`, first work item of each sequence.
        items: int32 `[max_items, 4]`: sequence (top bit: it has two or more items), first and end
            of its tokens in units of 16, length in tokens.
        partials: float32 `[max_items, num_heads, head_dim + 4]`, scratch memory of the kernel.
    """

    item_start: Tensor
    items: Tensor
    partials: Tensor

    def for_rows(self, num_seqs: int) -> DecodePlan:
        """Returns views of the part of the plan's memory that a smaller batch uses.

        Each batch size always gets the same addresses, as CUDA graphs require.
        """
        max_items = self.items.shape[0] - (self.item_start.shape[0] - 1) + num_seqs
        return DecodePlan(
            self.item_start[: num_seqs + 1], self.items[:max_items], self.partials[:max_items]
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


def make_decode_plan(
    device: torch.device,
    max_num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_dtype: torch.dtype,
) -> DecodePlan:
    """Allocates a plan for up to `max_num_seqs` sequences on a GPU.

    Args:
        device: a CUDA device with its index.

    Raises:
        NativeLibraryError: the CUDA kernels are not installed, or do not run on this GPU.
    """
    wave = library.decode_wave(device.index, cache_dtype, head_dim, num_heads, num_kv_heads)
    max_items = max_num_seqs + 2 * wave
    return DecodePlan(
        torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device),
        torch.zeros(max_items, 4, dtype=torch.int32, device=device),
        torch.zeros(max_items, num_heads, head_dim + _PARTIAL_PADDING, device=device),
    )


def min_item_tokens(head_dim: int, cache_dtype: torch.dtype) -> int:
    """Returns the smallest part of a context, in tokens; smaller parts would be slower."""
    return max(16, MIN_ITEM_BYTES // (2 * head_dim * cache_dtype.itemsize))


def plan_decode(
    plan: DecodePlan, seq_lens: Tensor, min_tokens: int, sliding_window: int | None = None
) -> None:
    """Divides the sequences into work items, on the device; the host reads no length.

    Each sequence is divided into equal parts, so short that all items run at once. If there are
    more sequences than can run at once, an item is at most 5/8 of the mean work of a unit.

    Args:
        plan: for as many sequences as `seq_lens` has (`DecodePlan.for_rows`); written.
        seq_lens: int32 `[num_seqs]`; 0 for a padded row, which does not change the items of others.
        min_tokens: parts are at least this long, in tokens; see `min_item_tokens`.
        sliding_window: window in tokens of the layers that use the plan.

    Raises:
        RuntimeError: an argument's dtype or shape does not fit.
    """
    _plan_decode(plan.item_start, plan.items, seq_lens, min_tokens, sliding_window)


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
    plan: DecodePlan | None = None,
) -> None:
    """Decode: the last token of each sequence attends to the whole sequence.

    PagedAttention (Kwon et al. 2023) with the online softmax of Milakov and Gimelshein (2018);
    ALiBi as in Press et al. (2022), sliding window as in Mistral (Jiang et al. 2023).

    Args:
        out: `[num_seqs, num_heads, head_dim]`, written; zeros for a sequence of length 0.
        q: `[num_seqs, num_heads, head_dim]`; any strides, last dimension contiguous.
        k_cache, v_cache: of one layer, shaped by `ops.cache.kv_cache_shapes`; dtype of q, or int8
            on a CPU, or float8_e4m3fn on a GPU. Slots beyond a sequence's length may hold any
            value, even NaN.
        block_table: int32 `[num_seqs, max_blocks]`; entries beyond a sequence's blocks are ignored.
        seq_lens: int32 `[num_seqs]`, tokens including the one whose query this is.
        scale: factor on the products of q and k.
        alibi_slopes: float32 `[num_heads]`; adds `slope * (key - query)` (positions) to the logits.
        sliding_window: a query sees this many keys, itself included; None: all of them.
        softcap: logits become `softcap * tanh(logit / softcap)` (Gemma 2) before slopes are added;
            None: they stay.
        k_scale, v_scale: factors on the values of an fp8 cache.
        plan: computed by `plan_decode` from the same seq_lens and window; None: one block of
            threads per sequence and kv head, which is slow for few long sequences. CPU kernels do
            not use it.

    Block sizes 8, 16 and 32. On CPU: float32 and bfloat16, head_dim a multiple of 16 up to 256; a
    sequence's result does not depend on the other sequences nor on the number of threads. On CUDA:
    float32, float16, bfloat16, head_dim up to 256 (`check_decode_support`); products of 16-bit
    numbers are summed in float32, and fp8 numbers are 16-bit ones before they are multiplied. On
    CPU the numbers of an int8 cache are converted to the dtype of the queries, which is exact. A
    key's scale multiplies its score, a value's scale its probability.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit. Block ids are not checked.
    """
    item_start, items, partials = (None, None, None) if plan is None else plan
    _paged_attention(
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        scale,
        alibi_slopes,
        sliding_window,
        softcap,
        k_scale,
        v_scale,
        item_start,
        items,
        partials,
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
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Prefill: ragged chunks of queries, each causal over its sequence's whole cached context.

    The queries `query_start_loc[i]` to `query_start_loc[i + 1]` are the last tokens of sequence i;
    their own K and V are in the cache already.

    Args:
        out, q: `[num_tokens, num_heads, head_dim]`; rows outside all sequences are not read or
            written.
        query_start_loc: int32 `[num_seqs + 1]`, in ascending order.
        seq_lens: int32 `[num_seqs]`, cached context and the chunk together.
        block_table and the others: as in `paged_attention`, with the same limits and guarantees; a
            token's result also does not depend on how its prompt was divided into chunks.

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
        softcap,
        k_scale,
        v_scale,
    )
