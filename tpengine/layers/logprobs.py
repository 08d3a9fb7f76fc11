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
    scores: torch.Tensor,
    raw: torch.Tensor,
    num_candidates: Sequence[int],
    is_ranked: Sequence[bool],
) -> list[Candidates]:
    """The best tokens of each row by `scores`, with their `raw` log probabilities.

    Args:
        scores, raw: `[num_rows, vocab_size]`.
        num_candidates: by row.
        is_ranked: by row, whether to find the candidates' ranks, for which a row is sorted.
    """
    best, ids = scores.topk(min(max(num_candidates), scores.shape[1]), dim=1)
    values, tokens, logprobs = best.tolist(), ids.tolist(), raw.gather(1, ids).tolist()
    found = []
    for i, count in enumerate(num_candidates):
        ranks = _ranks(raw[i], ids[i, :count]) if is_ranked[i] else []
        found.append(Candidates(tokens[i][:count], values[i][:count], logprobs[i][:count], ranks))
    return found


def _ranks(raw: torch.Tensor, ids: torch.Tensor) -> list[int]:
    """1 + the number of tokens that are likelier, for each of `ids`.

    Args:
        raw: `[vocab_size]`.
        ids: int64 `[num_ids]`.
    """
    not_likelier = torch.searchsorted(raw.sort().values, raw[ids], right=True)
    return (raw.shape[0] + 1 - not_likelier).tolist()
