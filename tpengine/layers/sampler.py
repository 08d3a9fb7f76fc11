"""Chooses the next token of every sampled row, vectorised over the batch.

Order: bans, temperature, top-k, top-p, min-p; log probabilities are of the raw logits. The noise of
a draw is a pure function of (seed, index of the sequence in its request, position), so neighbours,
preemption and recompute do not change it. Stages that no row asks for are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tpengine.messages import TokenLogprobs
from tpengine.ops import sampling as sampling_ops

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of the rows that are sampled in a step, each `[num_samples]`.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        noise_key: key of each row's noise, see `noise_keys`.
        positions: index that the sampled token will have in its sequence.
        num_logprobs: likeliest tokens to report; -1: no log probabilities at all.
        banned_token_ids: (row, ids that must not be sampled).
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    noise_key: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    banned_token_ids: list[tuple[int, list[int]]]


def noise_keys(seed: int, index: int) -> np.uint64:
    """Mixes a request's seed and a sequence's index into the key of its noise."""
    return np.uint64(_mix(_mix(seed & _MASK) + (index + 1) * _GOLDEN))


def uniform_noise(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row: element `position` of the SplitMix64 stream that `key` starts
    (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, dict[int, TokenLogprobs]]:
    """Chooses one token per row.

    Args:
        logits: `[num_samples, vocab_size]`; overwritten where tokens are banned.

    Returns:
        ids int64 `[num_samples]`, and log probabilities by row for those that asked.
    """
    wants_logprobs = np.flatnonzero(batch.num_logprobs >= 0)
    raw = _log_softmax_rows(logits, wants_logprobs) if len(wants_logprobs) else None
    for row, token_ids in batch.banned_token_ids:
        logits[row, token_ids] = -torch.inf
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if not batch.temperature.any():
        sampling_ops.argmax(out, logits)
    else:
        noise = uniform_noise(batch.noise_key, batch.positions)
        columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, noise)
        tensors = [torch.from_numpy(column).to(logits.device) for column in columns]
        sampling_ops.sample_tokens(out, logits, *tensors)
    if raw is None:
        return out, {}
    return out, _token_logprobs(raw, out, wants_logprobs, batch.num_logprobs)


def _log_softmax_rows(logits: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    picked = logits if len(rows) == logits.shape[0] else logits[torch.from_numpy(rows)]
    return torch.log_softmax(picked.float(), dim=-1)


def _token_logprobs(
    raw: torch.Tensor,
    chosen: torch.Tensor,
    rows: npt.NDArray[np.int64],
    num_logprobs: npt.NDArray[np.int32],
) -> dict[int, TokenLogprobs]:
    """raw `[len(rows), vocab_size]` are the log probabilities of `rows`."""
    own = raw.gather(1, chosen[torch.from_numpy(rows)].unsqueeze(1))
    ranks = (raw > own).sum(dim=1).add_(1).tolist()
    top_values, top_ids = raw.topk(min(int(num_logprobs[rows].max()), raw.shape[1]), dim=1)
    found = {}
    for i, row in enumerate(rows.tolist()):
        count = int(num_logprobs[row])
        found[row] = TokenLogprobs(
            logprob=float(own[i, 0]),
            rank=ranks[i],
            top_token_ids=top_ids[i, :count].tolist(),
            top_logprobs=top_values[i, :count].tolist(),
        )
    return found
