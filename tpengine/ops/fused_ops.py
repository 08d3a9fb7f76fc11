"""The ops between matrix products (embedding, norms, sums, activations, rotary embedding), and the
ops that choose token ids from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)

_embedding = torch.ops.tpengine.embedding.default
_rms_norm = torch.ops.tpengine.rms_norm.default
_add_rms_norm = torch.ops.tpengine.add_rms_norm.default
_layer_norm = torch.ops.tpengine.layer_norm.default
_add_layer_norm = torch.ops.tpengine.add_layer_norm.default
_accumulate = torch.ops.tpengine.accumulate.default
_add_gated = torch.ops.tpengine.add_gated.default
_relu = torch.ops.tpengine.relu.default
_silu = torch.ops.tpengine.silu.default
_gelu = torch.ops.tpengine.gelu.default
_gelu_tanh = torch.ops.tpengine.gelu_tanh.default
_silu_and_mul = torch.ops.tpengine.silu_and_mul.default
_gelu_and_mul = torch.ops.tpengine.gelu_and_mul.default
_gelu_tanh_and_mul = torch.ops.tpengine.gelu_tanh_and_mul.default
_rotary_embedding = torch.ops.tpengine.rotary_embedding.default
_argmax = torch.ops.tpengine.argmax.default
_sample_tokens = torch.ops.tpengine.sample_tokens.default


def embedding(out: Tensor, table: Tensor, token_ids: Tensor, scale: float = 1.0) -> None:
    """`out[i] = table[token_ids[i]] * scale`, rounded to out's dtype.

    Args:
        out: `[num_tokens, size]`, written.
        table: `[num_rows, size]`, float32 or bfloat16, same dtype as out.
        token_ids: int32 `[num_tokens]`.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit, or an id has no row.
    """
    _embedding(out, table, token_ids, scale)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    Normalised in float32, rounded to the weight's dtype, then multiplied by the weight, as Hugging
    Face's models do: Llama's weights have x's dtype, Gemma's `1 + weight` is float32.

    Args:
        out: shape and dtype of x, written; may be x itself.
        x: `[num_tokens, size]` or `[num_tokens, num_heads, size]` (norm per head); float32 or
            bfloat16; any strides, last dimension contiguous.
        weight: `[size]`, dtype of x or float32.
        eps: added to the mean square.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _rms_norm(out, x, weight, eps)


def add_rms_norm(out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """`residual += x` (rounded to its dtype), then `out = rms_norm(residual) * weight`.

    Args:
        out: `[num_tokens, size]`, written; may be x itself.
        x, residual: `[num_tokens, size]`, one dtype; residual is written.
        weight: `[size]`.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _add_rms_norm(out, x, residual, weight, eps)


def layer_norm(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> None:
    """Layer normalisation (Ba et al. 2016) over the last dimension, computed in float32 and rounded
    once.

    Args:
        out: shape and dtype of x, written; may be x itself.
        x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided.
        weight, bias: `[size]`, dtype of x; None: ones, zeros.
        eps: added to the variance.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _layer_norm(out, x, weight, bias, eps)


def add_layer_norm(
    out: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    """`residual += x` (rounded to its dtype), then `layer_norm` of it into `out`.

    Args:
        out: `[num_tokens, size]`, written; may be x itself.
        x, residual: `[num_tokens, size]`, one dtype; residual is written.
        weight, bias: `[size]`; None: ones, zeros.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _add_layer_norm(out, x, residual, weight, bias, eps)


def accumulate(total: Tensor, x: Tensor) -> None:
    """`total += x`, rounded to its dtype.

    Args:
        total, x: `[num_tokens, size]`, contiguous, float32 or bfloat16; total is written.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _accumulate(total, x)


def add_gated(total: Tensor, x: Tensor, gate: Tensor) -> None:
    """`total += sigmoid(gate) * x`, computed in float32 and rounded once.

    Args:
        total, x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided; total is written.
        gate: `[num_tokens, 1]`, same dtype.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _add_gated(total, x, gate)


def relu(x: Tensor) -> None:
    """`max(x, 0)` in place.

    Args:
        x: `[num_tokens, size]`, float32 or bfloat16; rows may be strided.

    Raises:
        RuntimeError: its dtype, shape or strides do not fit.
    """
    _relu(x)


def silu(x: Tensor) -> None:
    """`x / (1 + exp(-x))` in place; see `relu`."""
    _silu(x)


def gelu(x: Tensor) -> None:
    """The exact GELU (by the error function) in place; see `relu`."""
    _gelu(x)


def gelu_tanh(x: Tensor) -> None:
    """GELU's tanh approximation in place; see `relu`."""
    _gelu_tanh(x)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """SwiGLU's product (Shazeer 2020): `out = silu(gate) * up`.

    Args:
        out: `[num_tokens, n]`, written.
        x: `[num_tokens, 2 * n]`, gate first, then up; float32 or bfloat16, same dtype as out.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _silu_and_mul(out, x)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """`out = gelu(gate) * up` with the exact GELU (by the error function); see `silu_and_mul`."""
    _gelu_and_mul(out, x)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """`out = gelu(gate) * up` with GELU's tanh approximation; see `silu_and_mul`."""
    _gelu_tanh_and_mul(out, x)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotary position embedding (Su et al. 2021) on q and k in place, computed in float32.

    Args:
        positions: int32 `[num_tokens]`.
        q: `[num_tokens, num_heads, head_dim]`; any strides, last dimension contiguous.
        k: `[num_tokens, num_kv_heads, head_dim]`, likewise.
        cos_sin_cache: float32 `[max_position, rotary_dim]`: the rotary_dim / 2 cosines of each
            position, then its sines. rotary_dim is even and at most head_dim; the rest of a head
            stays as it is.
        is_neox: True pairs dimension i with i + rotary_dim / 2 (GPT-NeoX, Llama), False pairs
            neighbours (GPT-J).

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit, or a position has no row.
    """
    _rotary_embedding(positions, q, k, cos_sin_cache, is_neox)


def argmax(out: Tensor, logits: Tensor, logprobs: Tensor | None = None) -> None:
    """Token of the largest logit of each row; of equal logits the lowest id.

    Args:
        out: int64 `[rows]`, written.
        logits: `[rows, vocab]`, float32 or bfloat16. A row that holds NaN gives its first NaN.
        logprobs: float32 `[rows]`, written: log probability of the chosen token in the softmax of
            the logits; NaN where the largest logit is not finite. None: not wanted.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _argmax(out, logits, logprobs)


def sample_tokens(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    logprobs: Tensor | None = None,
) -> None:
    """Samples one token per row: temperature, top-k, top-p, min-p, then one uniform number.

    The probabilities of the kept tokens are summed in the order of their ids, and the token whose
    part of the sum contains `uniform` is chosen. So a row's token is a function of that row alone.

    Args:
        out: int64 `[rows]`, written.
        logits: `[rows, vocab]`, float32 or bfloat16; minus infinity bans a token.
        temperature: float32 `[rows]`; 0 is argmax.
        top_k: int32 `[rows]`; 0 is off. Of logits equal to the k-th largest, the lowest ids
            are kept, so that exactly k tokens remain.
        top_p: float32 `[rows]`; 1 is off. Keeps the smallest set of most probable tokens whose
            mass reaches top_p of the mass that top-k has kept (Holtzman et al. 2020). The token
            that crosses it is kept, and at least one token; of equal tokens the highest ids are
            dropped first.
        min_p: float32 `[rows]`; 0 is off. Keeps tokens at least min_p times as probable as the most
            probable one.
        uniform: float64 `[rows]` in [0, 1).
        logprobs: see `argmax`; temperature and filters do not change them.

    A row whose largest logit is not finite (NaN, infinity, all tokens banned) gives its argmax.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _sample_tokens(out, logits, temperature, top_k, top_p, min_p, uniform, logprobs)
