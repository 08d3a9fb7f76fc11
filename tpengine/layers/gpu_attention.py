"""Attention on a GPU: plans for decodes, and the library that computes prompt chunks.

A decode runs the engine's own paged kernel by a plan (`StepPlans`). A chunk of a prompt runs a
library's kernel, which cannot read pages: if a chunk has context in the cache, its K and V are
gathered from the pages first (`attend_chunks`).

`choose_backend` picks the library once, at start-up. Support differs between versions and cards,
and some libraries have aligned causal masks with the wrong corner, so each library must first
reproduce the plain result on a few small rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.ops import attention_ops
from tpengine.ops.cache_ops import gather_kv
from tpengine.ops.reference import attend_sequence

logger = init_logger(__name__)

MASK_ELEMENTS = 1 << 23
"""Most elements of one mask or bias; a longer chunk is computed in slices."""
_SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, torch's first choice on Hopper: it builds a plan for each new shape, which takes
tens of milliseconds or more (pytorch PR 155958, FunASR issue 3704: 0.44 s), and almost every prompt
has a new length."""
_MAX_ERROR = 0.02
"""Largest accepted relative error. Rounding to bfloat16 gives 4e-3, a wrong mask more than 0.1."""


@dataclass(slots=True)
class StepPlans:
    """The plans of one step. The first layer with a window computes its plan, the others reuse it.

    Plans are computed on the device. A CUDA graph contains this work, so that each replay plans for
    the sequence lengths of its own step.

    Args:
        memory: by window of the model's layers, sized for the largest number of rows in a step.
        min_tokens: see `ops.attention_ops.min_item_tokens`.
    """

    _memory: Mapping[int | None, attention_ops.DecodePlan]
    _min_tokens: int
    _made: dict[int | None, attention_ops.DecodePlan] = field(default_factory=dict)

    def get(self, seq_lens: Tensor, window: int | None) -> attention_ops.DecodePlan:
        """Returns the plan of a window.

        Args:
            seq_lens: int32 `[num_seqs]`, the same in every call of a step.
        """
        plan = self._made.get(window)
        if plan is None:
            plan = self._memory[window].for_rows(seq_lens.shape[0])
            attention_ops.plan_decode(plan, seq_lens, self._min_tokens, window)
            self._made[window] = plan
        return plan


@dataclass(slots=True)
class Chunks:
    """Lengths of some rows of a step, in the forms that the libraries take.

    Attributes:
        query_lens: tokens of each row's chunk.
        key_lens: tokens of each row's chunk and its context.
        query_start, key_start: int32 `[num_rows + 1]`, running sums of the lengths; one and the
            same tensor if no row has context.
        masks: masks that a backend has built for these lengths, by window; shared by all layers.
    """

    query_lens: list[int]
    key_lens: list[int]
    query_start: Tensor
    key_start: Tensor
    masks: dict[int | None, Any] = field(default_factory=dict)


def make_chunks(query_lens: list[int], key_lens: list[int], device: torch.device) -> Chunks:
    """Builds `Chunks` of these lengths, with their running sums on the device."""
    starts = [
        torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).int().to(device)
        for lengths in (query_lens, key_lens)
    ]
    return Chunks(query_lens, key_lens, starts[0], starts[1])


class AttentionRule(NamedTuple):
    """How a layer turns products of queries and keys into logits, in the order of the ops.

    Attributes:
        scale: factor on the products.
        slopes: ALiBi, float32 `[num_heads]`: `slope * (key - query)` is added; None: nothing.
        window: a query sees this many keys, itself included; None: all before it.
        softcap: logits become `softcap * tanh(logit / softcap)` before; None: they stay.
    """

    scale: float
    slopes: Tensor | None = None
    window: int | None = None
    softcap: float | None = None


class PrefillBackend(Protocol):
    """Attention over ragged rows, causal but for `BOTH_WAYS`; the queries of a row are the last of
    its keys."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, rule: AttentionRule) -> Tensor:
        """Computes attention of all rows.

        Args:
            q: `[num_tokens, num_heads, head_dim]`; any strides, last dimension contiguous.
            k, v: `[num_keys, num_kv_heads, head_dim]`, likewise.

        Returns:
            `[num_tokens, num_heads, head_dim]`.
        """


class VarlenBackend:
    """torch's FlashAttention-2 (`torch.nn.attention.varlen`), for 16-bit types."""

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 accepts grouped heads without an option, later versions require this one.
        groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
        self._options = {"enable_gqa": True} if groups else {}
        self._attend: Callable[..., Any] = varlen_attn

    def run(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, rule: AttentionRule) -> Tensor:
        """See `PrefillBackend.run`."""
        left = -1 if rule.window is None else rule.window - 1  # keys before the query's own
        starts = chunks.query_start, chunks.key_start
        longest = max(chunks.query_lens), max(chunks.key_lens)
        options = {"scale": rule.scale, "window_size": (left, 0), **self._options}
        attended: Tensor = self._attend(q, k, v, *starts, *longest, **options)
        return attended


class XformersBackend:
    """xformers' `memory_efficient_attention_forward`, which picks a kernel itself.

    Only its causal and local masks are used here. Its masks with a bias of a caller's tensor
    (`LowerTriangularMaskWithTensorBias`) hold one sequence, not a packed batch, so that models with
    ALiBi run in `SdpaBackend`.
    """

    def __init__(self) -> None:
        from xformers.ops import memory_efficient_attention_forward
        from xformers.ops.fmha import attn_bias

        self._attend: Callable[..., Tensor] = memory_efficient_attention_forward
        self._masks: Any = attn_bias

    def run(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, rule: AttentionRule) -> Tensor:
        """See `PrefillBackend.run`."""
        if rule.window not in chunks.masks:
            chunks.masks[rule.window] = self._mask(chunks, rule.window, q.device)
        group = q.shape[1] // k.shape[1]
        if group > 1:  # [1, tokens, kv heads, heads of one, head_dim], K and V repeated by stride
            q = q.unflatten(1, (k.shape[1], group))
            k, v = (x.unsqueeze(2).expand(-1, -1, group, -1) for x in (k, v))
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        mask = chunks.masks[rule.window]
        attended = self._attend(q, k, v, attn_bias=mask, scale=rule.scale)[0]
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
    """torch's `scaled_dot_product_attention`, one row at a time: the slowest backend, and the only
    one for float32, ALiBi, soft caps and every head dim.

    Args:
        is_causal: if false, a query also sees the keys after it; a window is as wide there as
            before it.
    """

    def __init__(self, is_causal: bool = True) -> None:
        self._is_causal = is_causal

    def run(self, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, rule: AttentionRule) -> Tensor:
        """See `PrefillBackend.run`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        first_query = first_key = 0
        with sdpa_kernel(_SDPA_KERNELS):
            for queries, keys in zip(chunks.query_lens, chunks.key_lens, strict=True):
                row_k, row_v = (x[first_key : first_key + keys] for x in (k, v))
                heads = 1 if rule.slopes is None and rule.softcap is None else q.shape[1]
                step = max(1, MASK_ELEMENTS // (heads * keys))
                for start in range(0, queries, step):
                    count = min(step, queries - start)
                    rows = slice(first_query + start, first_query + start + count)
                    position = keys - queries + start
                    inputs = q[rows], row_k, row_v, position, rule
                    out[rows] = _attend_slice(*inputs, self._is_causal)
                first_query, first_key = first_query + queries, first_key + keys
        return out


BOTH_WAYS = SdpaBackend(is_causal=False)
"""For layers whose tokens also see those after them. It has not run on a card yet."""


def _attend_slice(
    q: Tensor, k: Tensor, v: Tensor, position: int, rule: AttentionRule, is_causal: bool
) -> Tensor:
    """Attention of the queries at `position` and after to the keys from position 0 on.

    Args:
        q: `[num_queries, num_heads, head_dim]`.
        k, v: `[num_keys, num_kv_heads, head_dim]`.

    Returns:
        `[num_queries, num_heads, head_dim]`.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # KV heads are the batch dimension, so that the heads of a group read the same K and V.
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    mask = None
    is_plain = rule.window is None and rule.slopes is None and rule.softcap is None
    is_square = position == 0 and num_queries == k.shape[2]
    if not is_plain or (is_causal and not is_square):
        at = torch.arange(position, position + num_queries, device=q.device).unsqueeze(1)
        distance = at - torch.arange(k.shape[2], device=q.device)
        if not is_causal:
            distance.abs_()
        mask = distance >= 0
        if rule.window is not None:
            mask &= distance < rule.window
        if rule.slopes is not None:
            bias = -rule.slopes.view(num_kv_heads, group, 1, 1) * distance
            mask = bias.masked_fill(~mask, float("-inf")).to(q.dtype)
    if rule.softcap is None:
        attended = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=mask, is_causal=is_causal and mask is None, scale=rule.scale
        )
    else:  # no library's kernel caps logits
        assert mask is not None
        logits = grouped.float() @ k.float().transpose(-1, -2) * (rule.scale / rule.softcap)
        logits = logits.tanh_().mul_(rule.softcap).masked_fill_(~mask, float("-inf"))
        attended = logits.softmax(-1).to(v.dtype) @ v
    return attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a model's attention needs on one rank.

    Attributes:
        windows: the windows of all layers.
        has_slopes: whether the model uses ALiBi.
        softcap: see `AttentionRule`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    windows: frozenset[int | None]
    has_slopes: bool
    softcap: float | None = None


BACKENDS: dict[str, Callable[[], PrefillBackend]] = {
    "xformers": XformersBackend,
    "varlen": VarlenBackend,
    "sdpa": SdpaBackend,
}
"""By their names in `config.ATTENTION_BACKENDS`, in the order in which `auto` tries them."""


def choose_backend(wanted: str, shape: PrefillShape, device: torch.device) -> PrefillBackend:
    """Returns the backend `wanted`; for `auto` the first that works.

    Raises:
        ConfigError: no such backend works here; the message says why.
    """
    names = list(BACKENDS) if wanted == "auto" else [wanted]
    reasons: list[str] = []
    for name in names:
        opened = _open_backend(name, shape, device)
        if not isinstance(opened, str):
            passed = f" (not {'; not '.join(reasons)})" if reasons else ""
            logger.info("attention: prompts by %s%s", name, passed)
            return opened
        reasons.append(f"{name}: {opened}")
    raise ConfigError(
        f"attention_backend = {wanted!r} cannot be used: {'; '.join(reasons)}; "
        + ("report this" if wanted == "auto" else "choose another, or leave it at 'auto'")
    )


def _open_backend(name: str, shape: PrefillShape, device: torch.device) -> PrefillBackend | str:
    """Returns the backend, or the reason why it cannot be used."""
    if name != "sdpa":
        if shape.has_slopes:
            return "it is called without linear biases (ALiBi), which this model needs"
        if shape.softcap is not None:
            return "it has no soft cap of logits, which this model needs"
        if shape.dtype == torch.float32:
            return "it takes float16 and bfloat16 only, this model runs in float32"
    try:
        backend = BACKENDS[name]()
        worst = max(
            _relative_error(backend, shape, window, chunks)
            for window in shape.windows
            for chunks in (
                make_chunks([9, 3, 40], [9, 3, 40], device),  # no context
                make_chunks([9, 2, 40], [30, 19, 40], device),
            )
        )
    except ImportError as error:
        return f"it is not installed ({error})"
    except Exception as error:  # a library may raise any error where it does not fit
        lines = str(error).strip().splitlines()
        return f"it fails here ({type(error).__name__}: {lines[0] if lines else 'no message'})"
    if not worst < _MAX_ERROR:  # this form also rejects NaN
        return f"its results are wrong here (relative error {worst:.3f})"
    return backend


def _relative_error(
    backend: PrefillBackend, shape: PrefillShape, window: int | None, chunks: Chunks
) -> float:
    """Relative error of a backend against plain float32, on random rows of these lengths."""
    gen, device = torch.Generator().manual_seed(0), chunks.key_start.device
    query_lens, key_lens = chunks.query_lens, chunks.key_lens
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    packed = torch.randn(sum(key_lens), heads + 2 * kv_heads, shape.head_dim, generator=gen)
    packed = packed.to(device, shape.dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)  # strided like real projections
    q = q[: sum(query_lens)]
    slopes = torch.linspace(0.5, 0.1, heads, device=device) if shape.has_slopes else None
    # A window of 7 cuts every row; the real one is longer than these rows.
    window = None if window is None else min(window, 7)
    rule = AttentionRule(shape.head_dim**-0.5, slopes, window, shape.softcap)
    with torch.inference_mode():
        attended = backend.run(q, k, v, chunks, rule).float()
        rows = zip(q.split(query_lens), k.split(key_lens), v.split(key_lens), strict=True)
        exact = torch.cat([attend_sequence(q, k, v, *rule) for q, k, v in rows])
        return float((attended - exact).norm() / exact.norm())


@dataclass(slots=True)
class ChunkGroup:
    """Neighbouring chunks of a step that are computed together.

    Attributes:
        rows: the group's rows among the step's chunks.
        tokens: the group's tokens among the tokens of these chunks.
        has_context: whether any chunk has keys before its own, which the cache holds.
    """

    rows: slice
    tokens: slice
    chunks: Chunks
    has_context: bool


@dataclass(slots=True)
class GpuBatch:
    """See `AttentionMetadata.gpu`.

    Attributes:
        plans: of the decodes; None without the CUDA library, because only its kernels use plans.
        backend: computes the chunks.
        gathered: buffers for K and V of chunks with context, each
            `[max_gathered_tokens, num_kv_heads, head_dim]` in the model's dtype.
        groups: of the chunks.
    """

    plans: StepPlans | None
    backend: PrefillBackend
    gathered: tuple[Tensor, Tensor]
    groups: list[ChunkGroup] = field(default_factory=list)


def group_rows(
    query_lens: Sequence[int], seq_lens: Sequence[int], max_gathered_tokens: int
) -> list[tuple[slice, bool]]:
    """Divides chunks into groups of neighbours whose keys fit into the gather buffers.

    Args:
        max_gathered_tokens: at least the longest of `seq_lens`.

    Returns:
        For each group its rows, and whether any of them has context. If no row has context, all
        rows are one group, because nothing is gathered.
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
    out: Tensor,
    qkv: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    kv_scales: tuple[float, float],
    block_table: Tensor,
    batch: GpuBatch,
    backend: PrefillBackend,
    rule: AttentionRule,
) -> None:
    """Attention of the step's chunks, whose K and V the cache already holds.

    Args:
        out: `[num_tokens, num_heads, head_dim]`, written.
        qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]` of the chunks, rotated.
        kv_scales: see `Attention`.
        block_table: int32 `[num_chunks, max_blocks]`.
    """
    num_heads = out.shape[1]
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for group in batch.groups:
        tokens, chunks = group.tokens, group.chunks
        keys, values = k[tokens], v[tokens]
        if group.has_context:
            num_keys = sum(chunks.key_lens)
            keys, values = (buffer[:num_keys] for buffer in batch.gathered)
            table = block_table[group.rows]
            gather_kv(keys, values, *kv_cache, table, chunks.key_start, *kv_scales)
        out[tokens] = backend.run(q[tokens], keys, values, chunks, rule)
