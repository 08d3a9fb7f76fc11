"""Attention over the paged KV cache, and the metadata of a step that every layer reads.

Which code computes it: decodes or chunks here, in `Attention.forward`; the library of a GPU in
`gpu_attention.choose_backend`; a kernel or plain torch in `ops/library.op`. The layout of the cache
on each device is decided in `ops/cache_ops.py` (`kv_cache_shapes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import pad

from tpengine.layers.gpu_attention import BOTH_WAYS, AttentionRule, GpuBatch, attend_chunks
from tpengine.layers.linear import Linear
from tpengine.layers.norm import QKNorm
from tpengine.ops import attention_ops, cache_ops

KVCache = tuple[Tensor, Tensor]
"""K and V of one layer, shaped by `ops.cache_ops.kv_cache_shapes` for the device."""
_HEAD_DIM_STEP = 16


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """What a step needs that computes tokens of pictures.

    Attributes:
        rotation: places of the step's tokens in a table of their own, int32 `[num_tokens]`, and the
            table, see `rotary.turned_table`; None: they are rotated as text.
        rows: int64 `[num_rows]`, tokens that stand for pictures.
        added: `[num_layers, num_rows, hidden_size]`, what is added to them after each of the first
            layers.
        key_ends: of the tokens in chunks, see `ops.reference.prefill_attention`; None: they are
            causal.
    """

    rotation: tuple[Tensor, Tensor] | None
    rows: Tensor
    added: Tensor
    key_ends: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CrossRows:
    """What the tokens of a step see of an encoder prompt, by token: all of it.

    Attributes:
        block_table: int32 `[num_tokens, max_blocks]`.
        lengths: int32 `[num_tokens]`.
    """

    block_table: Tensor
    lengths: Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """The ragged batch of one step: rows of one token first (decodes), then longer chunks.

        |<------------------- seq_len -------------------->|
        |<-- computed before this step -->|<-- query_len ->|

    Attributes:
        positions: int32 `[num_tokens]`, position of each token in its sequence.
        slot_mapping: int32 `[num_tokens]`, slot of each token's K and V; -1: they are not written.
        block_table: int32 `[num_seqs, max_blocks]`.
        seq_lens: int32 `[num_seqs]`, tokens with K and V in the cache after this step's writes.
        query_start_loc: int32 `[num_seqs - num_decodes + 1]`, borders of the chunks among the
            tokens that follow the decodes.
        num_decodes: rows with one token; their tokens are the first `num_decodes` tokens.
        wanted_rows: int64 `[num_wanted]`, the tokens whose final hidden states are needed; None:
            all. For the other tokens the last layer computes K and V only.
        gpu: what attention needs on a GPU in addition; None on CPU.
        pictures: what tokens that stand for pictures need; None: there are none.
        token_types: int32 `[num_tokens]`, which text of a pair each token is of; None: the first.
        cross: None: the model has one half.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    num_decodes: int
    wanted_rows: Tensor | None = None
    gpu: GpuBatch | None = None
    pictures: PictureTokens | None = None
    token_types: Tensor | None = None
    cross: CrossRows | None = None
    _ends_of_whole: dict[int | None, Tensor] = field(default_factory=dict)

    def ends_of_whole(self, window: int | None) -> Tensor:
        """Returns the `key_ends` of tokens in chunks that are whole sequences, in which a token
        also sees those after it, see `ops.reference.prefill_attention`. The first layer with a
        window computes them, the others reuse them.

        Args:
            window: a token sees those at most `window - 1` before and after it; None: all.
        """
        ends = self._ends_of_whole.get(window)
        if ends is None:
            lengths = self.seq_lens[self.num_decodes :]
            ends = lengths.repeat_interleave(self.query_start_loc.diff())
            if window is not None:
                ends = ends.minimum(self.positions[self.num_decodes :] + window)
            self._ends_of_whole[window] = ends
        return ends


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What one layer reads of a step.

    Attributes:
        kv_cache: of the layer.
        rows: the tokens to keep after the layer's attention; None: all. They are `wanted_rows` for
            the last layer: no later layer attends to the others.
    """

    kv_cache: KVCache
    metadata: AttentionMetadata
    rows: Tensor | None

    def keep(self, x: Tensor) -> Tensor:
        """x `[num_tokens, ...]` to `[num_kept, ...]`."""
        return keep_rows(x, self.rows)


def keep_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """x `[num_tokens, ...]` to `[len(rows), ...]`; None: x itself."""
    return x if rows is None else x.index_select(0, rows)


@dataclass(eq=False)
class Attention:
    """Attention of this rank's heads, with rotary embedding where the model has it.

    Attributes:
        cos_sin_cache: float32 `[max_positions, rotary_dim]`; None: no rotary embedding.
        is_bidirectional: whether a token also sees those after it. A step then computes whole
            sequences only. If false, attention is causal.
        kv_scales: factors on K and V of an fp8 cache, see `worker.gpu.attention_plans`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    cos_sin_cache: Tensor | None = None
    is_bidirectional: bool = False
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def forward(self, qkv: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """Writes the step's K and V into the cache, then attends to the cached sequences.

        Args:
            qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; rotated in place.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """
        self._write_kv(qkv, kv_cache, metadata)
        num_tokens, q_size = qkv.shape[0], self.num_heads * self.head_dim
        out = qkv.new_empty(num_tokens, q_size)
        out_heads = out.view(num_tokens, self.num_heads, self.head_dim)
        heads = qkv.view(num_tokens, -1, self.head_dim)
        q = heads[:, : self.num_heads]
        decodes = metadata.num_decodes
        table, lengths, gpu = metadata.block_table, metadata.seq_lens, metadata.gpu
        k, v = kv_cache
        if decodes:
            own = out_heads, q, table, lengths
            if decodes < lengths.shape[0]:  # a slice takes microseconds, in each layer
                own = out_heads[:decodes], q[:decodes], table[:decodes], lengths[:decodes]
            plan: attention_ops.DecodePlan | tuple[None, None, None] = (None, None, None)
            if gpu is not None and gpu.plans is not None:
                plan = gpu.plans.get(own[3], self.rule.window)
            rule = *self.rule, *self.kv_scales
            attention_ops.paged_attention(own[0], own[1], k, v, own[2], own[3], *rule, *plan)
        if decodes == lengths.shape[0]:
            return out
        out_chunks, chunk_table = out_heads[decodes:], table[decodes:]
        if gpu is not None:
            backend = BOTH_WAYS if self.is_bidirectional else gpu.backend
            own_chunks = heads[decodes:], kv_cache, self.kv_scales, chunk_table
            attend_chunks(out_chunks, *own_chunks, gpu, backend, self.rule)
            return out
        starts, lengths = metadata.query_start_loc, lengths[decodes:]
        chunks = out_chunks, q[decodes:], k, v, chunk_table, starts, lengths
        ends: Tensor | None = None
        if self.is_bidirectional:
            ends = metadata.ends_of_whole(self.rule.window)
        elif metadata.pictures is not None:
            ends = metadata.pictures.key_ends
        attention_ops.prefill_attention(*chunks, *self.rule, *self.kv_scales, ends)
        return out

    def _write_kv(self, qkv: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> None:
        if self.cos_sin_cache is not None:
            rotated = metadata.positions, qkv, self.cos_sin_cache
            if metadata.pictures is not None and metadata.pictures.rotation is not None:
                positions, table = metadata.pictures.rotation
                rotated = positions, qkv, table
            num_heads = self.num_heads, self.num_kv_heads
            cache_ops.rotary_write_kv_cache(
                *rotated, metadata.slot_mapping, *kv_cache, *num_heads, *self.kv_scales
            )
            return
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        first_v = self.num_heads + self.num_kv_heads
        k, v = heads[:, self.num_heads : first_v], heads[:, first_v:]
        cache_ops.write_kv_cache(k, v, *kv_cache, metadata.slot_mapping, *self.kv_scales)


def padded_head_dim(head_dim: int) -> int:
    """Returns the head size of the KV cache for such heads: kernels take multiples of 16."""
    return -(-head_dim // _HEAD_DIM_STEP) * _HEAD_DIM_STEP


class PaddedAttention(Attention):
    """Attention whose heads are smaller than those of the KV cache: zeros behind them change no
    product. The copies that this takes are no ops of tpengine, so that a CPU records no step."""

    def __init__(self, unpadded: Attention) -> None:
        super().__init__(**vars(unpadded))
        self._unpadded_dim = unpadded.head_dim
        self.head_dim = padded_head_dim(unpadded.head_dim)

    def forward(self, qkv: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        """See `Attention.forward`; qkv and the result have heads without padding."""
        size = self._unpadded_dim
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, size)
        padded = pad(heads, (0, self.head_dim - size)).flatten(1)
        out = super().forward(padded, kv_cache, metadata)
        return out.view(-1, self.num_heads, self.head_dim)[..., :size].flatten(1)


@dataclass(eq=False)
class SelfAttention:
    """Attention with its projections, as every family has it.

    Attributes:
        qkv: `[hidden_size]` to `[(num_heads + 2 * num_kv_heads) * head_dim]`.
        out: `[num_heads * head_dim]` to `[hidden_size]`.
        qk_norm: applied to queries and keys before they are rotated; None: the model has none.
    """

    qkv: Linear
    attention: Attention
    out: Linear
    qk_norm: QKNorm | None = None

    def __post_init__(self) -> None:
        if self.attention.head_dim % _HEAD_DIM_STEP:
            self.attention = PaddedAttention(self.attention)

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """x `[num_tokens, hidden_size]` to `[num_kept, hidden_size]`."""
        qkv = self.qkv.forward(x)
        if self.qk_norm is not None:
            self.qk_norm.forward(qkv)
        attended = self.attention.forward(qkv, step.kv_cache, step.metadata)
        return self.out.forward(step.keep(attended))
