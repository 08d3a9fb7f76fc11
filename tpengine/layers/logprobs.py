"""Log probabilities for the user, and candidates for beam search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tpengine.messages import Candidates, TokenLogprobs


def log_softmax_rows(logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Log probabilities, float32 `[len(rows), vocab_size]`, of some rows of logits."""
    picked = logits if len(rows) == logits.shape[0] else logits[torch.from_numpy(rows)]
    return torch.log_softmax(picked.float(), dim=-1)


def token_logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """What is reported of each row.

    Args:
        raw: log probabilities `[num_rows, vocab_size]`.
        chosen: int64 `[num_rows]`, the token that stands at the position.
        num_top: likeliest tokens to report, by row.
    """
    own = raw.gather(1, chosen.unsqueeze(1))
    ranks = (raw > own).sum(dim=1).add_(1).tolist()
    top_values, top_ids = raw.topk(min(max(num_top), raw.shape[1]), dim=1)
    logprobs, values, ids = own[:, 0].tolist(), top_values.tolist(), top_ids.tolist()
    return [
        TokenLogprobs(logprobs[i], ranks[i], ids[i][:count], values[i][:count])
        for i, count in enumerate(num_top)
    ]


def candidates(
    scores: torch.Tensor, raw: torch.Tensor, num_candidates: Sequence[int]
) -> list[Candidates]:
    """The best tokens of each row by `scores`, with their `raw` log probabilities.

    Args:
        scores, raw: `[num_rows, vocab_size]`.
    """
    best, ids = scores.topk(min(max(num_candidates), scores.shape[1]), dim=1)
    values, tokens, logprobs = best.tolist(), ids.tolist(), raw.gather(1, ids).tolist()
    return [
        Candidates(tokens[i][:count], values[i][:count], logprobs[i][:count])
        for i, count in enumerate(num_candidates)
    ]
