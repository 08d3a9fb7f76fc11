"""Our paged attention behind transformers' attention interface.

A batch is one row of tokens, `[1, num_tokens]`. Transformers' code calls the interface once for
each layer; call i of a pass has KV cache i. What it calls depends on the pass that runs: a `Probe`
learns each call's shape, scale and window, a `Step` computes attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tpengine.layers.attention import Attention, AttentionMetadata, KVCache, padded_head_dim
from tpengine.layers.gpu_attention import AttentionRule
from tpengine.ops.attention_ops import MAX_HEAD_DIM

INTERFACE = "tpengine"
"""Name under which transformers finds it."""
_IGNORED = {
    *("cache_position", "dropout", "past_key_values", "position_embeddings", "position_ids"),
    *("is_causal", "return_dict", "sliding_window"),
}
"""Arguments of the interface that change nothing: what a token sees is in the mask."""
_SHAPING = {"scaling", "softcap"}
"""Arguments that are in the `Shape`."""
_FAR = 1 << 20
"""A position beyond every window."""

Heads = torch.Tensor
"""`[1, num_heads, num_tokens, head_dim]`."""


class UnfitError(Exception):
    """A class needs something that paged attention does not do; the message names it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention call on this rank; `value_dim` is the head size of V."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rule: AttentionRule


class Probe:
    """A pass in which attention mixes no tokens.

    Attributes:
        shapes: of the attention calls so far, in their order.
        masks: of the pass, by the address of their memory, with the function that says what they
            show. A class may slice a mask, which leaves it in its memory.
    """

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.masks: dict[int, tuple[torch.Tensor, Callable[..., Any]]] = {}

    def attend(self, shape: Shape, q: Heads, k: Heads, v: Heads) -> torch.Tensor:
        """Returns `[1, num_tokens, num_heads, value_dim]`, which depend on all three arguments; the
        means depend on the rotation, so that a wrong position shows."""
        self.shapes.append(shape)
        seen = v + k.mean(-1, keepdim=True)
        groups = shape.num_heads // shape.num_kv_heads
        mixed = seen.repeat_interleave(groups, dim=1) + q.mean(-1, keepdim=True)
        return mixed.transpose(1, 2).contiguous()


class Step:
    """One forward pass of the engine."""

    def __init__(
        self, layers: list[PagedLayer], kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> None:
        self.calls = zip(layers, kv_caches, strict=True)
        self.metadata = metadata


class PagedLayer:
    """Attention of one call, with heads padded to the size of the KV cache's."""

    def __init__(self, shape: Shape, padded_dim: int) -> None:
        self._pads = {padded_dim} != {shape.head_dim, shape.value_dim}
        self._value_dim = shape.value_dim
        self.attention = Attention(shape.num_heads, shape.num_kv_heads, padded_dim, shape.rule)

    def forward(
        self, parts: tuple[Heads, Heads, Heads], kv_cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """q, k and v to `[1, num_tokens, num_heads, value_dim]`."""
        num_tokens, padded_dim = parts[0].shape[2], self.attention.head_dim
        by_token = [part.transpose(1, 2) for part in parts]
        if self._pads:
            by_token = [pad(part, (0, padded_dim - part.shape[3])) for part in by_token]
        qkv = torch.cat(by_token, dim=2).view(num_tokens, -1)
        out = self.attention.forward(qkv, kv_cache, metadata)
        return out.view(1, num_tokens, -1, padded_dim)[..., : self._value_dim]


def make_layers(shapes: list[Shape]) -> list[PagedLayer]:
    """One per attention call. All get the largest head size, padded to what the kernels take.

    Raises:
        UnfitError: the numbers of KV heads differ, or heads are too large.
    """
    kv_heads = {shape.num_kv_heads for shape in shapes}
    if len(kv_heads) > 1:
        raise UnfitError(f"its layers have different numbers of KV heads ({sorted(kv_heads)})")
    largest = max(shape.head_dim for shape in shapes)
    padded = padded_head_dim(largest)
    if padded > MAX_HEAD_DIM:
        raise UnfitError(f"its heads have {largest} elements, the limit is {MAX_HEAD_DIM}")
    return [PagedLayer(shape, padded) for shape in shapes]


_PASS: ContextVar[Probe | Step] = ContextVar("_PASS")


@contextlib.contextmanager
def running(current: Probe | Step) -> Iterator[None]:
    """Makes it the pass of this thread."""
    token = _PASS.set(current)
    try:
        yield
    finally:
        _PASS.reset(token)


def _attend(
    module: Any, q: Heads, k: Heads, v: Heads, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    current = _PASS.get()
    if isinstance(current, Probe):
        window = _find_window(current, module, attention_mask)
        return current.attend(_shape_of(q, k, v, window, options), q, k, v), None
    layer, kv_cache = next(current.calls)
    return layer.forward((q, k, v), kv_cache, current.metadata), None


def _make_mask(*, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, 1, 1, device=options.get("device"))
    if isinstance(probe := _PASS.get(), Probe):
        probe.masks[mask.untyped_storage().data_ptr()] = mask, mask_function
    return mask


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(INTERFACE, _make_mask)


def _find_window(probe: Probe, module: Any, mask: Any) -> int | None:
    """Returns the window of an attention call, as `_window_of` does.

    Raises:
        UnfitError: what `_window_of` raises; or the mask is not one of `_make_mask`.
    """
    if mask is None:
        if not getattr(module, "is_causal", True):
            raise UnfitError("its tokens attend to later ones")
        return None
    made = probe.masks.get(mask.untyped_storage().data_ptr())
    if made is None:
        raise UnfitError("it makes a mask or a bias of attention itself")
    return _window_of(made[1])


def _window_of(visible: Callable[..., Any]) -> int | None:
    """Returns the window of a mask, in tokens; None: a token sees all tokens before it.

    Args:
        visible: mask function of transformers: batch, head, query and key index to a bool.

    Raises:
        UnfitError: the mask is neither causal nor a causal window.
    """
    zero = torch.zeros((), dtype=torch.int64)
    windows = set()
    for query in (_FAR, _FAR + 12345):
        keys = torch.arange(query + 64)
        row = torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(len(keys))
        count = int(row.sum())
        if bool(row[query + 1 :].any()):
            raise UnfitError("its tokens attend to later ones")
        if not bool(row[query + 1 - count : query + 1].all()):
            raise UnfitError("its attention mask is neither causal nor a sliding window")
        windows.add(None if count == query + 1 else count)
    if len(windows) != 1:
        raise UnfitError("its attention mask divides the text into chunks")
    return windows.pop()


def _shape_of(q: Heads, k: Heads, v: Heads, window: int | None, options: dict[str, Any]) -> Shape:
    set_ones = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(set_ones - _IGNORED - _SHAPING):
        names = ", ".join(unknown).replace("s_aux", "s_aux (sinks)")
        raise UnfitError(f"its attention takes {names}, which ours does not have")
    if k.shape[2] != q.shape[2]:
        raise UnfitError("it attends to other tokens than those of the sequence (cross attention)")
    if q.shape[1] % k.shape[1] or v.shape[1:3] != k.shape[1:3] or v.shape[3] > k.shape[3]:
        shapes = [list(part.shape) for part in (q, k, v)]
        raise UnfitError(f"q, k and v of its attention have the shapes {shapes}")
    scale = options.get("scaling")
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    rule = AttentionRule(scale, window=window, softcap=options.get("softcap"))
    return Shape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], rule)
