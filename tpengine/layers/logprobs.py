"""Log probabilities for the user, and candidates for beam search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.pending import Array, Pending
from tpengine.layers.upload import upload
from tpengine.messages import Candidates, TokenLogprobs


def pick_rows(tensor: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows in ascending order; the tensor itself if these are all."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(rows, tensor.device))


def log_softmax_rows(logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Log probabilities, float32 `[len(rows), vocab_size]`, of some rows of logits."""
    return torch.log_softmax(pick_rows(logits, rows).float(), dim=-1)


def token_logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> Pending[list[TokenLogprobs]]:
    """What is reported of each row.

    Args:
        raw: log probabilities `[num_rows, vocab_size]`.
        chosen: int64 `[num_rows]`, the token that stands at the position.
        num_top: likeliest tokens to report, by row.
    """
    own = raw.gather(1, chosen.unsqueeze(1))
    ranks = (raw > own).sum(dim=1).add_(1)
    top_values, top_ids = raw.topk(min(max(num_top), raw.shape[1]), dim=1)

    def read(arrays: Sequence[Array]) -> list[TokenLogprobs]:
        logprobs, ranks, values, ids = (array.tolist() for array in arrays)
        return [
            TokenLogprobs(logprobs[i], ranks[i], ids[i][:count], values[i][:count])
            for i, count in enumerate(num_top)
        ]

    return Pending([own[:, 0], ranks, top_values, top_ids], read)


def candidates(
    scores: torch.Tensor,
    raw: torch.Tensor,
    num_candidates: Sequence[int],
    is_ranked: Sequence[bool],
) -> Pending[list[Candidates]]:
    """The best tokens of each row by `scores`, with their `raw` log probabilities.

    Args:
        scores, raw: `[num_rows, vocab_size]`.
        num_candidates: by row.
        is_ranked: by row, whether to find the candidates' ranks, for which a row is sorted.
    """
    best, best_ids = scores.topk(min(max(num_candidates), scores.shape[1]), dim=1)
    ranked = [i for i, wanted in enumerate(is_ranked) if wanted]

    def read(arrays: Sequence[Array]) -> list[Candidates]:
        values, ids, logprobs = (array.tolist() for array in arrays[:3])
        ranks = {i: array.tolist() for i, array in zip(ranked, arrays[3:], strict=True)}
        return [
            Candidates(ids[i][:count], values[i][:count], logprobs[i][:count], ranks.get(i, []))
            for i, count in enumerate(num_candidates)
        ]

    rows = [_ranks(raw[i], best_ids[i, : num_candidates[i]]) for i in ranked]
    return Pending([best, best_ids, raw.gather(1, best_ids), *rows], read)


def _ranks(raw: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """1 + the number of tokens that are likelier, for each of `ids`.

    Args:
        raw: `[vocab_size]`.
        ids: int64 `[num_ids]`.
    """
    not_likelier = torch.searchsorted(raw.sort().values, raw[ids], right=True)
    return raw.shape[0] + 1 - not_likelier
