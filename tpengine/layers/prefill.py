"""Attention of prompts' chunks on a GPU, by kernels of libraries that know no pages.

Where no chunk has context in the cache they run straight on the packed projections; where one has,
its K and V are gathered from the pages first (`gpu_attention`). `prefill_choice` picks the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_MASK_ELEMENTS = 1 << 23
"""Of a mask or bias that is made at once; longer chunks are done in slices."""
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's, torch's first choice on Hopper: it makes a plan for each new shape, which takes tens
of milliseconds or more (pytorch PR 155958, FunASR issue 3704: 0.44 s), and prompts' lengths are
all different."""


@dataclass(slots=True)
class Chunks:
    """Some rows of a step, as the kernels of a library want to know them.

    Attributes:
        query_lens, key_lens: tokens of each row's chunk, and with its context.
        query_start, key_start: int32 `[num_rows + 1]`, their running sums; one tensor where no row
            has context.
        masks: what a backend makes of these lengths, by window, for all layers of a step.
    """

    query_lens: list[int]
    key_lens: list[int]
    query_start: torch.Tensor
    key_start: torch.Tensor
    masks: dict[int | None, Any] = field(default_factory=dict)


def make_chunks(query_lens: list[int], key_lens: list[int], device: torch.device) -> Chunks:
    """Chunks of these lengths, their sums taken here."""
    starts = [
        torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int().to(device)
        for lengths in (query_lens, key_lens)
    ]
    return Chunks(query_lens, key_lens, starts[0], starts[1])


class PrefillBackend(Protocol):
    """Causal attention over ragged rows whose queries are the last of their keys.

    Attributes:
        name: one of `config.ATTENTION_BACKENDS`.
    """

    name: str

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunks: Chunks,
        scale: float,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q `[num_tokens, num_heads, head_dim]`, k and v `[num_keys, num_kv_heads, head_dim]`, any
        strides but the last; returns the shape of q."""


class VarlenBackend:
    """torch's FlashAttention-2 (`torch.nn.attention.varlen`), for 16-bit types."""

    name = "varlen"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 takes grouped heads as they are, later versions want to be told.
        groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
        self._options = {"enable_gqa": True} if groups else {}
        self._attend: Callable[..., Any] = varlen_attn

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunks: Chunks,
        scale: float,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PrefillBackend`."""
        left = -1 if window is None else window - 1  # keys before the query's own
        attended: torch.Tensor = self._attend(
            q,
            k,
            v,
            chunks.query_start,
            chunks.key_start,
            max(chunks.query_lens),
            max(chunks.key_lens),
            scale=scale,
            window_size=(left, 0),
            **self._options,
        )
        return attended


class XformersBackend:
    """xformers' `memory_efficient_attention_forward`, which picks a kernel by itself."""

    name = "xformers"

    def __init__(self) -> None:
        from xformers.ops import memory_efficient_attention_forward
        from xformers.ops.fmha import attn_bias

        self._attend: Callable[..., torch.Tensor] = memory_efficient_attention_forward
        self._masks: Any = attn_bias

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunks: Chunks,
        scale: float,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PrefillBackend`."""
        if window not in chunks.masks:
            chunks.masks[window] = self._mask(chunks, window, q.device)
        group = q.shape[1] // k.shape[1]
        if group > 1:  # [1, tokens, kv heads, heads of one, head_dim], K and V repeated by stride
            q = q.unflatten(1, (k.shape[1], group))
            k, v = (x.unsqueeze(2).expand(-1, -1, group, -1) for x in (k, v))
        attended = self._attend(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            attn_bias=chunks.masks[window],
            scale=scale,
        )[0]
        return attended.flatten(1, 2) if group > 1 else attended

    def _mask(self, chunks: Chunks, window: int | None, device: torch.device) -> Any:
        queries, keys = chunks.query_lens, chunks.key_lens
        if window is None and queries == keys:
            return self._masks.BlockDiagonalCausalMask.from_seqlens(queries, device=device)
        blocks = self._masks.BlockDiagonalMask.from_seqlens(queries, keys, device=device)
        if window is None:
            return blocks.make_causal_from_bottomright()
        return blocks.make_local_attention_from_bottomright(window)


class SdpaBackend:
    """torch's `scaled_dot_product_attention`, row by row: slower, and takes everything (float32,
    ALiBi, any head dim)."""

    name = "sdpa"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunks: Chunks,
        scale: float,
        window: int | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `PrefillBackend`."""
        with sdpa_kernel(_SDPA_KERNELS):
            return self._attend_rows(q, k, v, chunks, scale, window, slopes)

    def _attend_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunks: Chunks,
        scale: float,
        window: int | None,
        slopes: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first_query = first_key = 0
        for queries, keys in zip(chunks.query_lens, chunks.key_lens, strict=True):
            row_k, row_v = (x[first_key : first_key + keys] for x in (k, v))
            heads = 1 if slopes is None else q.shape[1]
            step = max(1, _MASK_ELEMENTS // (heads * keys))
            for start in range(0, queries, step):
                count = min(step, queries - start)
                rows = slice(first_query + start, first_query + start + count)
                position = keys - queries + start
                out[rows] = _attend_slice(q[rows], row_k, row_v, position, scale, window, slopes)
            first_query, first_key = first_query + queries, first_key + keys
        return out


def _attend_slice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    scale: float,
    window: int | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[num_queries, num_heads, head_dim]` at `position` and after to keys from 0."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # KV heads are the batch, so that the heads of a group read the same K and V.
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    mask = None
    is_causal = position == 0 and num_queries == k.shape[2] and window is None and slopes is None
    if not is_causal:
        at = torch.arange(position, position + num_queries, device=q.device).unsqueeze(1)
        distance = at - torch.arange(k.shape[2], device=q.device)
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        if slopes is not None:
            bias = -slopes.view(num_kv_heads, group, 1, 1) * distance
            mask = bias.masked_fill(~mask, float("-inf")).to(q.dtype)
    attended = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=mask, is_causal=is_causal, scale=scale
    )
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
