"""What attention on a GPU needs beside the metadata of a step: plans of decode attention, and how
prompts' chunks are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tpengine.layers.prefill import Chunks, PrefillBackend
from tpengine.ops import attention as attention_ops
from tpengine.ops.cache import gather_kv


class DecodePlans:
    """The memory of decode attention's plans, one for each window that the layers have.

    Args:
        plans: by window, for the most rows of a step.
        min_tokens: see `ops.attention.min_item_tokens`.
    """

    def __init__(
        self, plans: Mapping[int | None, attention_ops.DecodePlan], min_tokens: int
    ) -> None:
        self._plans = plans
        self._min_tokens = min_tokens

    @property
    def num_bytes(self) -> int:
        """Of all plans."""
        return sum(plan.num_bytes for plan in self._plans.values())

    def for_step(self) -> StepPlans:
        """Plans of the next step, none of which is made yet."""
        return StepPlans(self._plans, self._min_tokens)


class StepPlans:
    """A step's plans, each made by the first layer that has its window, and used by the others.

    They are made on the device. In a CUDA graph that is part of the graph, so that a replay plans
    by the lengths that it finds.
    """

    def __init__(
        self, plans: Mapping[int | None, attention_ops.DecodePlan], min_tokens: int
    ) -> None:
        self._plans = plans
        self._min_tokens = min_tokens
        self._made: dict[int | None, attention_ops.DecodePlan] = {}

    def get(self, seq_lens: torch.Tensor, window: int | None) -> attention_ops.DecodePlan:
        """The plan for these rows, the same in all calls of a step."""
        plan = self._made.get(window)
        if plan is None:
            plan = self._plans[window].for_rows(seq_lens.shape[0])
            attention_ops.plan_decode(plan, seq_lens, self._min_tokens, window)
            self._made[window] = plan
        return plan


@dataclass(slots=True)
class ChunkGroup:
    """Neighbouring chunks of a step that are computed at once.

    Attributes:
        rows, tokens: which they are, among the step's chunks and their tokens.
        has_context: whether any has keys beyond its chunk, which the cache holds.
    """

    rows: slice
    tokens: slice
    chunks: Chunks
    has_context: bool


@dataclass(slots=True)
class GpuBatch:
    """See `AttentionMetadata.gpu`.

    Attributes:
        plans: of the decodes; None without the CUDA library, whose ops alone use them.
        groups: of the longer chunks.
        backend: who computes those.
        gathered: K and V `[max_gathered_tokens, num_kv_heads, head_dim]` of chunks with context.
    """

    plans: StepPlans | None
    backend: PrefillBackend
    gathered: tuple[torch.Tensor, torch.Tensor]
    groups: list[ChunkGroup] = field(default_factory=list)


def group_rows(
    query_lens: Sequence[int], seq_lens: Sequence[int], max_gathered_tokens: int
) -> list[tuple[slice, bool]]:
    """Divides chunks into neighbours whose keys can be gathered together.

    Args:
        max_gathered_tokens: at least the longest of `seq_lens`.

    Returns:
        For each group its rows, and whether any of them has context. All rows are one group where
        none has, as nothing is gathered then.
    """
    if list(query_lens) == list(seq_lens):
        return [(slice(0, len(query_lens)), False)] if query_lens else []
    groups, first, total = [], 0, 0
    for row, length in enumerate(seq_lens):
        if row > first and total + length > max_gathered_tokens:
            groups.append(slice(first, row))
            first, total = row, 0
        total += length
    groups.append(slice(first, len(seq_lens)))
    return [(rows, list(query_lens[rows]) != list(seq_lens[rows])) for rows in groups]


def attend_chunks(
    out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    kv_scales: tuple[float, float],
    block_table: torch.Tensor,
    batch: GpuBatch,
    scale: float,
    window: int | None,
    slopes: torch.Tensor | None,
) -> None:
    """Attention of the step's chunks, whose K and V are in the cache already.

    Args:
        out: `[num_tokens, num_heads, head_dim]`, written.
        qkv: q `[num_tokens, num_heads, head_dim]`, k and v `[num_tokens, num_kv_heads, head_dim]`
            of the chunks, rotated.
        block_table: int32 `[num_chunks, max_blocks]`.
    """
    q, k, v = qkv
    for group in batch.groups:
        tokens, chunks = group.tokens, group.chunks
        keys, values = k[tokens], v[tokens]
        if group.has_context:
            num_keys = sum(chunks.key_lens)
            keys, values = (buffer[:num_keys] for buffer in batch.gathered)
            table = block_table[group.rows]
            gather_kv(keys, values, *kv_cache, table, chunks.key_start, *kv_scales)
        out[tokens] = batch.backend.forward(q[tokens], keys, values, chunks, scale, window, slopes)
