"""Attention over the paged KV cache: one query per sequence, or ragged chunks of queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.ops import library, reference
from tpengine.ops.library import op

_logger = init_logger(__name__)
_plan_decode = op(reference.plan_decode, "item_start", "items")
paged_attention = op(reference.paged_attention, "out", "partials")
prefill_attention = op(reference.prefill_attention, "out")


MAX_HEAD_DIM = 256
"""Of the kernels of both devices; `models.registry` and `models.fallback` refuse more."""
TENSOR_CORE_HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
"""Head dims that the CUDA decode kernel for 16-bit and fp8 caches is compiled for."""
MIN_ITEM_BYTES = 128 * 1024
"""Bytes of K and V of one kv head from which on a part of a context gets its own work item (256
tokens of a bf16 cache with head dim 128)."""
_PARTIAL_PADDING = 4
_FP8_CAPABILITY = (8, 9)
"""First compute capability on which the kernels can convert fp8 numbers."""


def check_decode_support(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    """Checks at start-up that the CUDA decode kernels support a model's attention.

    A head dim without a tensor-core kernel runs on the CUDA cores, with a warning.

    Args:
        capability: compute capability of the GPU.

    Raises:
        ConfigError: they do not; the message says what to change.
    """
    is_fp8 = cache_dtype == torch.float8_e4m3fn
    assert is_fp8 or cache_dtype == dtype, "`check_kv_cache_dtype` refuses int8 on a GPU"
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
        NativeLibraryError: the CUDA kernels do not run on this GPU.
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
