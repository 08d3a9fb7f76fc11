"""Chooses the next token of every sampled row, vectorised over the batch.

Order: processors, bias, bans, penalties (`logit_edits`), temperature, top-k, top-p, min-p; log
probabilities are of the raw logits. The noise of a draw is a pure function of (seed, index of the
sequence in its request, position), so neighbours, preemption and recompute do not change it. Stages
that no row asks for are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.logit_edits import LogitEdits, apply_edits, find_lost_rows
from tpengine.layers.logprobs import candidates, log_softmax_rows, pick_rows, token_logprobs
from tpengine.layers.pending import Pending, known, together
from tpengine.layers.upload import upload
from tpengine.messages import Candidates, TokenLogprobs
from tpengine.ops import sampling as sampling_ops

_Answer = TypeVar("_Answer")
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
        num_candidates: candidates to report for beam search, 0: none.
        edits: what rows ask to be done to their logits; None: nothing.
        on_device: `sampling_columns`, sent to the device before the model runs; None: not yet.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    noise_key: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int32]
    num_logprobs: npt.NDArray[np.int32]
    num_candidates: npt.NDArray[np.int32]
    edits: LogitEdits | None = None
    on_device: list[torch.Tensor] | None = None


@dataclass(slots=True)
class Findings:
    """What was found out about the sampled rows beside their tokens.

    Attributes:
        logprobs: by row, for those that asked.
        candidates: by row, for those that asked.
        errors: by row, why nothing could be chosen; its id means nothing.
    """

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Sampled:
    """What was chosen for each row.

    Attributes:
        token_ids: int64 `[num_samples]`.
        findings: beside them.
    """

    token_ids: torch.Tensor
    findings: Pending[Findings] = field(default_factory=lambda: known(Findings()))


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


def sampling_columns(batch: SamplingBatch) -> list[npt.NDArray[np.generic]]:
    """What `ops.sampling.sample_tokens` wants of each row, in its order."""
    noise = uniform_noise(batch.noise_key, batch.positions)
    return [batch.temperature, batch.top_k, batch.top_p, batch.min_p, noise]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Chooses one token per row. Nothing is read from the device but by the users' processors.

    Args:
        logits: `[num_samples, vocab_size]`; may be overwritten.
    """
    reported = np.flatnonzero((batch.num_logprobs >= 0) | (batch.num_candidates > 0))
    raw = log_softmax_rows(logits, reported) if len(reported) else None
    beams = np.flatnonzero(batch.num_candidates)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if batch.edits is not None or len(beams):
        logits = logits.float()  # no bias or score is rounded to the model's dtype
    if raw is not None and len(beams):
        # Beams are ranked by edited log probabilities, as in transformers.
        scores = pick_rows(raw, np.searchsorted(reported, beams))
        logits[upload(beams, logits.device)] = scores
    broken = {} if batch.edits is None else apply_edits(logits, batch.edits)
    if not batch.temperature.any():
        sampling_ops.argmax(token_ids, logits)
    else:
        tensors = batch.on_device
        if tensors is None:
            columns = sampling_columns(batch)
            tensors = [upload(column, logits.device) for column in columns]
        sampling_ops.sample_tokens(token_ids, logits, *tensors)
    lost: Pending[dict[int, str]] = known({})
    if batch.edits is not None:
        is_beam = upload(batch.num_candidates > 0, logits.device)
        lost = find_lost_rows(logits, token_ids, batch.edits, is_beam)
    reports = _reports(token_ids, batch, logits, raw, reported)
    pending = together([*reports, lost])

    def read(arrays: Sequence[npt.NDArray[np.generic]]) -> Findings:
        logprobs, candidates, errors = pending.read(arrays)
        return Findings(logprobs, candidates, errors | broken)

    return Sampled(token_ids, Pending(pending.tensors, read))


def _reports(
    token_ids: torch.Tensor,
    batch: SamplingBatch,
    logits: torch.Tensor,
    raw: torch.Tensor | None,
    reported: npt.NDArray[np.int64],
) -> tuple[Pending[dict[int, TokenLogprobs]], Pending[dict[int, Candidates]]]:
    """Log probabilities and candidates, by row.

    Args:
        logits: `[num_samples, vocab_size]`, edited.
        raw: `[len(reported), vocab_size]`, log probabilities of the rows `reported`, if any.
    """
    logprobs: Pending[dict[int, TokenLogprobs]] = known({})
    best: Pending[dict[int, Candidates]] = known({})
    rows = np.flatnonzero(batch.num_logprobs >= 0)
    if raw is not None and len(rows):
        own = pick_rows(raw, np.searchsorted(reported, rows))
        chosen = pick_rows(token_ids, rows)
        logprobs = _by_row(rows, token_logprobs(own, chosen, batch.num_logprobs[rows].tolist()))
    rows = np.flatnonzero(batch.num_candidates)
    if raw is not None and len(rows):
        own = pick_rows(raw, np.searchsorted(reported, rows))
        is_ranked = (batch.num_logprobs[rows] >= 0).tolist()
        counts = batch.num_candidates[rows].tolist()
        best = _by_row(rows, candidates(pick_rows(logits, rows), own, counts, is_ranked))
    return logprobs, best


def _by_row(
    rows: npt.NDArray[np.int64], pending: Pending[list[_Answer]]
) -> Pending[dict[int, _Answer]]:
    numbers = rows.tolist()
    return Pending(
        pending.tensors, lambda arrays: dict(zip(numbers, pending.read(arrays), strict=True))
    )
