"""Which library computes prompts' attention on a GPU: chosen once at start-up, the first that is
there and computes this model's attention as plain arithmetic does.

Libraries differ in what they support, by version and by card, and some have aligned causal masks
with other corners: so each is tried on small rows before it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpengine.errors import ConfigError
from tpengine.layers.prefill import (
    PrefillBackend,
    SdpaBackend,
    VarlenBackend,
    XformersBackend,
    make_chunks,
)
from tpengine.logger import init_logger

logger = init_logger(__name__)

_MAX_ERROR = 0.02
"""bfloat16's products leave 4e-3; a wrong mask leaves tenths."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a model asks of its attention on one rank.

    Attributes:
        windows: those of its layers.
        has_slopes: whether it has ALiBi.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    windows: frozenset[int | None]
    has_slopes: bool


_BACKENDS: dict[str, Callable[[], PrefillBackend]] = {
    "xformers": XformersBackend,
    "varlen": VarlenBackend,
    "sdpa": SdpaBackend,
}


def choose_backend(wanted: str, shape: PrefillShape, device: torch.device) -> PrefillBackend:
    """The backend that was asked for, or the first that works.

    Raises:
        ConfigError: it does not work here; the message says what is missing.
    """
    names = list(_BACKENDS) if wanted == "auto" else [wanted]
    reasons = []
    for name in names:
        found = _try(name, shape, device)
        if not isinstance(found, str):
            passed = f" (not {'; not '.join(reasons)})" if reasons else ""
            logger.info("attention: prompts by %s%s", name, passed)
            return found
        reasons.append(f"{name}: {found}")
    raise ConfigError(
        f"attention_backend = {wanted!r} cannot be used: {'; '.join(reasons)}; "
        + ("report this" if wanted == "auto" else "choose another, or leave it at 'auto'")
    )


def _try(name: str, shape: PrefillShape, device: torch.device) -> PrefillBackend | str:
    """The backend; or what is missing."""
    if name != "sdpa":
        if shape.has_slopes:
            return "it has no linear biases (ALiBi), which this model needs"
        if shape.dtype == torch.float32:
            return "it takes float16 and bfloat16 only, this model runs in float32"
    try:
        backend = _BACKENDS[name]()
        worst = max(_error_of(backend, shape, window, device) for window in shape.windows)
    except ImportError as error:
        return f"it is not installed ({error})"
    except Exception as error:  # whatever a foreign library raises where it does not fit
        lines = str(error).strip().splitlines()
        return f"it fails here ({type(error).__name__}: {lines[0] if lines else 'no message'})"
    if not worst < _MAX_ERROR:  # NaN is none either
        return f"its results are wrong here (relative error {worst:.3f})"
    return backend


def _error_of(
    backend: PrefillBackend, shape: PrefillShape, window: int | None, device: torch.device
) -> float:
    """Relative error over rows with and without context, against float64."""
    window = None if window is None else min(window, 7)
    return max(
        _error_on(backend, shape, window, device, [9, 3, 40], [9, 3, 40]),
        _error_on(backend, shape, window, device, [9, 2, 40], [30, 19, 40]),
    )


def _error_on(
    backend: PrefillBackend,
    shape: PrefillShape,
    window: int | None,
    device: torch.device,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
) -> float:
    gen = torch.Generator().manual_seed(0)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    packed = torch.randn(sum(key_lens), heads + 2 * kv_heads, shape.head_dim, generator=gen)
    packed = packed.to(device, shape.dtype)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)  # strided, as the projections are
    q = q[: sum(query_lens)]
    slopes = torch.linspace(0.5, 0.1, heads, device=device) if shape.has_slopes else None
    chunks = make_chunks(list(query_lens), list(key_lens), device)
    scale = shape.head_dim**-0.5
    with torch.inference_mode():
        attended = backend.forward(q, k, v, chunks, scale, window, slopes).double()
        exact = torch.empty_like(attended)
        query, key = 0, 0
        for queries, keys in zip(query_lens, key_lens, strict=True):
            rows, span = slice(query, query + queries), slice(key, key + keys)
            exact[rows] = _plain(q[rows], k[span], v[span], scale, window, slopes)
            query, key = query + queries, key + keys
        return float((attended - exact).norm() / exact.norm())


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device).unsqueeze(1)
    distance = at - torch.arange(k.shape[0], device=q.device)
    if slopes is not None:
        logits -= slopes.double().view(-1, 1, 1) * distance
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
