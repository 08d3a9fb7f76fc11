"""The ops that choose token ids from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from tpengine.ops import library as _library  # noqa: F401 (defines the ops)

_argmax = torch.ops.tpengine.argmax.default
_sample_tokens = torch.ops.tpengine.sample_tokens.default


def argmax(out: Tensor, logits: Tensor) -> None:
    """Token of the largest logit of each row; of equal logits the lowest id.

    Args:
        out: int64 `[rows]`, written.
        logits: `[rows, vocab]`, float32 or bfloat16. A row that holds NaN gives its first NaN.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _argmax(out, logits)


def sample_tokens(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
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

    A row whose largest logit is not finite (NaN, infinity, all tokens banned) gives its argmax.

    Raises:
        RuntimeError: an argument's dtype, shape or strides do not fit.
    """
    _sample_tokens(out, logits, temperature, top_k, top_p, min_p, uniform)
