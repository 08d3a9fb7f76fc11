"""Chooses the next token of every sampled row, vectorised over the batch.

Order: processors, bias, allowed tokens, masks of grammars, bans, penalties (`logit_edits`), then
temperature, top-k, top-p, min-p. Reported
log probabilities are of the raw logits, or, if `SamplingBatch.processed`, of what all these stages
made of them. The noise of a row is a pure function of (seed, index of the sequence in its request,
position), so neighbours, preemption and recompute do not change it. A stage that no row asks for is
skipped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.device_values import (
    Answer,
    Array,
    Int32,
    Int64,
    Pending,
    known,
    together,
    upload,
)
from tpengine.layers.logit_edits import BROKEN, LogitEdits, apply_edits, find_lost_rows
from tpengine.messages import Candidates, RowError, TokenLogprobs
from tpengine.ops import fused_ops as fused
from tpengine.ops.reference import filtered_weights

RAW_ALONE = -2
MAX_COMMON_TOP = 64
"""Rows that report more tokens than this are sorted one by one, so that the others need not be."""
_MAX_SORTED = 1 << 23
"""Logits that are truncated at a time; bounds the temporary tensors to about 400 MiB."""
Filters = list[Array]
"""temperature, top_k, top_p and min_p of some rows, see `SamplingBatch`."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of the rows that are sampled in a step, each `[num_samples]`.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        noise_key: key of each row's noise, see `noise_keys`.
        positions: position of the sampled token in its sequence.
        num_logprobs: most probable tokens to report, 0 for the chosen token alone; -1: `sample`
            reports the chosen token's log probability by the logits that it chooses from, at
            temperature 1 and without truncation, which costs nothing; `RAW_ALONE`: by the raw
            logits, without its rank.
        num_candidates: candidates to report for beam search; 0: no candidates.
        edits: edits of the rows' logits; None: no row has any.
        on_device: `sampling_columns` as tensors, if they were sent before the model ran.
        processed: whether log probabilities are those of the processed logits.
    """

    temperature: npt.NDArray[np.float32]
    top_k: Int32
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    noise_key: npt.NDArray[np.uint64]
    positions: Int32
    num_logprobs: Int32
    num_candidates: Int32
    edits: LogitEdits | None = None
    on_device: list[torch.Tensor] | None = None
    processed: bool = False

    @property
    def filters(self) -> Filters:
        """What makes processed log probabilities of the edited logits."""
        return [self.temperature, self.top_k, self.top_p, self.min_p]


@dataclass(slots=True)
class Findings:
    """What the sampler reports of rows in addition to their tokens, by row.

    Attributes:
        chosen_logprobs: float32, of the chosen tokens; valid for rows that are not in `logprobs`.
        logprobs: of the rows with a `num_logprobs` of 0 or more.
        candidates: of the rows that asked for them.
        errors: why no token could be sampled; the token id of such a row has no meaning.
    """

    chosen_logprobs: array[float] = field(default_factory=lambda: array("f"))
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)


@dataclass(slots=True)
class Sampled:
    """The result of `sample`.

    Attributes:
        token_ids: int64 `[num_samples]`, on the device.
        findings: known when its tensors are on the host.
    """

    token_ids: torch.Tensor
    findings: Pending[Findings] = field(default_factory=lambda: known(Findings()))


def noise_keys(seed: int, index: int) -> np.uint64:
    """Mixes a request's seed and a sequence's index into the key of the sequence's noise."""
    return np.uint64(_mix(_mix(seed & _MASK) + (index + 1) * _GOLDEN))


def uniform_noise(keys: npt.NDArray[np.uint64], positions: Int32) -> npt.NDArray[np.float64]:
    """Returns a number in [0, 1) per row, float64 `[num_rows]`.

    It is element `position` of the SplitMix64 stream that starts at `key` (Steele, Lea, Flood,
    OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        z = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    noise: npt.NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return noise


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sampling_columns(batch: SamplingBatch) -> list[npt.NDArray[np.generic]]:
    """Returns the arguments of `ops.fused_ops.sample_tokens` after the logits, in its order."""
    return [*batch.filters, uniform_noise(batch.noise_key, batch.positions)]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Chooses one token per row. Only the users' logits processors read from the device.

    Args:
        logits: `[num_samples, vocab_size]`, float32 or bfloat16; may be overwritten.
    """
    reported = np.flatnonzero((batch.num_logprobs >= 0) | (batch.num_candidates > 0))
    beams = np.flatnonzero(batch.num_candidates)
    before_edits = beams if batch.processed else reported
    shares = None
    if len(before_edits):
        shares = torch.log_softmax(_pick_rows(logits, before_edits).float(), dim=-1)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    chosen = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    write_raw = _raw_logprobs(logits, batch)
    if len(beams) or not (batch.edits is None or batch.edits.only_ban):
        logits = logits.float()  # so that no bias or score is rounded to the model's dtype
    if shares is not None and len(beams):
        # Beams are ranked by edited log probabilities, as in transformers.
        scores = _pick_rows(shares, np.searchsorted(before_edits, beams))
        logits[upload(beams, logits.device)] = scores
    failed = {} if batch.edits is None else apply_edits(logits, batch.edits)
    if not batch.temperature.any():
        fused.argmax(token_ids, logits, chosen)
    else:
        tensors = batch.on_device
        if tensors is None:
            columns = sampling_columns(batch)
            tensors = [upload(column, logits.device) for column in columns]
        fused.sample_tokens(token_ids, logits, *[*tensors, chosen])
    write_raw(token_ids, chosen)
    lost: Pending[dict[int, RowError]] = known({})
    if batch.edits is not None:
        is_beam = upload(batch.num_candidates > 0, logits.device)
        lost = find_lost_rows(logits, token_ids, chosen, batch.edits, is_beam)
    if batch.processed and len(reported):
        filters = [column[reported] for column in batch.filters]
        edited, sampled = _pick_rows(logits, reported), _pick_rows(token_ids, reported)
        shares = processed_logprobs(edited, filters, sampled)
    reports = [] if shares is None else _report(token_ids, batch, logits, shares, reported)
    own_logprobs = Pending([chosen], lambda arrays: array("f", arrays[0].tobytes()))
    pending = together([own_logprobs, lost, *reports])

    def read(arrays: Sequence[Array]) -> Findings:
        chosen_logprobs, errors, *rest = pending.read(arrays)
        logprobs, candidates = rest or ({}, {})
        if batch.edits is None and (is_nan := np.isnan(chosen_logprobs)).any():
            errors = dict.fromkeys(np.flatnonzero(is_nan).tolist(), BROKEN)
        return Findings(chosen_logprobs, logprobs, candidates, errors | failed)

    return Sampled(token_ids, Pending(pending.tensors, read))


def _raw_logprobs(
    logits: torch.Tensor, batch: SamplingBatch
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Reads the raw logits of the rows `RAW_ALONE` before they are edited. Returns a function that
    takes the sampled ids, int64 `[num_samples]`, and their log probabilities, float32
    `[num_samples]`, and replaces the log probabilities of these rows."""
    rows = np.flatnonzero(batch.num_logprobs == RAW_ALONE)
    if batch.edits is None or not len(rows):  # the kernel's own are those of the raw logits
        return lambda token_ids, chosen: None
    raw = _pick_rows(logits, rows)
    # The kernel adds up a row in half the time of `logsumexp`. It gives that of the best token; the
    # others follow in the kernel's own order, so that the bits are those without a neighbour.
    best = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    best_logprob = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    fused.argmax(best, raw, best_logprob)
    best_logit = raw.gather(1, best.unsqueeze(1)).squeeze(1).float()
    if raw is logits and logits.dtype == torch.float32 and not batch.edits.only_ban:
        raw = logits.clone()  # the edits change the logit of the chosen token

    def write(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
        own = raw.gather(1, _pick_rows(token_ids, rows).unsqueeze(1)).squeeze(1)
        chosen[upload(rows, chosen.device)] = own.float() - best_logit + best_logprob

    return write


def processed_logprobs(
    logits: torch.Tensor, filters: Filters, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """Log probabilities after temperature, top-k, top-p and min-p, as vLLM 0.5.4 reported them. In
    a greedy row the temperature is 1 and all tokens stay.

    Args:
        logits: `[num_rows, vocab_size]`.
        filters: each `[num_rows]`.
        chosen: int64 `[num_rows]`, tokens that stay in any case: the kernel that chose them may
            have rounded the border of top-p otherwise.

    Returns:
        float32 `[num_rows, vocab_size]`; minus infinity for a token that was dropped.
    """
    temperature, top_k, top_p, min_p = filters
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    scaled = logits.float() / upload(divisor, logits.device).unsqueeze(1)
    cut = np.flatnonzero((temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)))
    step = max(1, _MAX_SORTED // logits.shape[1])
    for rows in (cut[first : first + step] for first in range(0, len(cut), step)):
        at = upload(rows, logits.device)
        columns = [upload(column[rows], logits.device) for column in filters]
        dropped = filtered_weights(logits[at], *columns) == 0
        if chosen is not None:
            dropped.scatter_(1, chosen[at].unsqueeze(1), False)
        scaled[at] = scaled[at].masked_fill_(dropped, -torch.inf)
    return torch.log_softmax(scaled, dim=-1)


def _report(
    token_ids: torch.Tensor,
    batch: SamplingBatch,
    logits: torch.Tensor,
    shares: torch.Tensor,
    reported: Int64,
) -> tuple[Pending[dict[int, TokenLogprobs]], Pending[dict[int, Candidates]]]:
    """Log probabilities and candidates, by row of the batch.

    Args:
        token_ids: int64 `[num_samples]`, the chosen tokens.
        logits: float32 `[num_samples, vocab_size]`, edited.
        shares: float32 `[len(reported), vocab_size]`, log probabilities of the rows `reported`.
    """
    logprobs: Pending[dict[int, TokenLogprobs]] = known({})
    best: Pending[dict[int, Candidates]] = known({})
    rows = np.flatnonzero(batch.num_logprobs >= 0)
    if len(rows):
        own = _pick_rows(shares, np.searchsorted(reported, rows))
        chosen = _pick_rows(token_ids, rows)
        logprobs = _by_row(rows, token_logprobs(own, chosen, batch.num_logprobs[rows].tolist()))
    rows = np.flatnonzero(batch.num_candidates)
    if len(rows):
        own = _pick_rows(shares, np.searchsorted(reported, rows))
        is_ranked = (batch.num_logprobs[rows] >= 0).tolist()
        counts = batch.num_candidates[rows].tolist()
        best = _by_row(rows, _best_tokens(_pick_rows(logits, rows), own, counts, is_ranked))
    return logprobs, best


def _by_row(rows: Int64, pending: Pending[list[Answer]]) -> Pending[dict[int, Answer]]:
    return Pending(
        pending.tensors, lambda arrays: dict(zip(rows.tolist(), pending.read(arrays), strict=True))
    )


def _pick_rows(tensor: torch.Tensor, rows: Int64) -> torch.Tensor:
    """Selects rows, given in ascending order; returns the tensor itself if these are all."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(rows, tensor.device))


def token_logprobs(
    shares: torch.Tensor, chosen: torch.Tensor, num_top: Sequence[int]
) -> Pending[list[TokenLogprobs]]:
    """Log probability and rank of the chosen token, and the most probable tokens, by row.

    Args:
        shares: log probabilities, float32 `[num_rows, vocab_size]`.
        chosen: int64 `[num_rows]`, the token at the row's position.
        num_top: how many of the most probable tokens to report, by row; all, if there are fewer.
    """
    own = shares.gather(1, chosen.unsqueeze(1))
    ranks = (shares > own).sum(dim=1).add_(1)
    vocab_size = shares.shape[1]
    common = max((count for count in num_top if count <= MAX_COMMON_TOP), default=0)
    long = [i for i, count in enumerate(num_top) if count > MAX_COMMON_TOP]
    tops = [highest(shares, min(common, vocab_size))]
    tops += [highest(shares[i], min(num_top[i], vocab_size)) for i in long]

    def read(arrays: Sequence[Array]) -> list[TokenLogprobs]:
        logprobs, ranks, values, ids, *rest = (array.tolist() for array in arrays)
        for place, i in enumerate(long):
            values[i], ids[i] = rest[2 * place : 2 * place + 2]
        return [
            TokenLogprobs(logprobs[i], ranks[i], ids[i][:count], values[i][:count])
            for i, count in enumerate(num_top)
        ]

    tensors = [tensor for values, ids in tops for tensor in (values, ids.int())]
    return Pending([own[:, 0], ranks, *tensors], read)


def highest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest of the last dimension, and their indexes, int64. On a CPU the first of equal ones
    count: which ones `torch.topk` takes depends on the number of rows."""
    values, indexes = scores.topk(count)
    if not scores.is_cpu or not count:
        return values, indexes
    rows, chosen, least = (
        scores.view(-1, scores.shape[-1]),
        indexes.view(-1, count),
        values[..., -1:],
    )
    num_candidates = (scores >= least).sum(-1).view(-1)
    for row in (num_candidates > count).nonzero()[:, 0].tolist():
        border = rows[row, chosen[row, -1]]
        higher = chosen[row][rows[row, chosen[row]] > border]
        equal = (rows[row] == border).nonzero()[: count - len(higher), 0]
        chosen[row] = torch.cat([higher, equal])
    indexes = indexes.sort(-1).values
    values, order = scores.gather(-1, indexes).sort(dim=-1, descending=True, stable=True)
    return values, indexes.gather(-1, order)


def _best_tokens(
    scores: torch.Tensor, shares: torch.Tensor, counts: Sequence[int], is_ranked: Sequence[bool]
) -> Pending[list[Candidates]]:
    """The tokens of each row with the highest `scores`, with their log probabilities.

    Args:
        scores, shares: float32 `[num_rows, vocab_size]`.
        counts: how many tokens, by row.
        is_ranked: whether to report the tokens' ranks, by row; this sorts the whole row.
    """
    best, best_ids = highest(scores, min(max(counts), scores.shape[1]))
    ranked = [i for i, wanted in enumerate(is_ranked) if wanted]

    def read(arrays: Sequence[Array]) -> list[Candidates]:
        values, ids, logprobs = (array.tolist() for array in arrays[:3])
        ranks = {i: array.tolist() for i, array in zip(ranked, arrays[3:], strict=True)}
        return [
            Candidates(ids[i][:count], values[i][:count], logprobs[i][:count], ranks.get(i, []))
            for i, count in enumerate(counts)
        ]

    rows = [_ranks(shares[i], best_ids[i, : counts[i]]) for i in ranked]
    return Pending([best, best_ids, shares.gather(1, best_ids), *rows], read)


def _ranks(shares: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rank of each token by log probability; the most probable token has rank 1.

    Args:
        shares: float32 `[vocab_size]`.
        ids: int64 `[num_ids]`.

    Returns:
        int64 `[num_ids]`.
    """
    not_above = torch.searchsorted(shares.sort().values, shares[ids], right=True)
    return shares.shape[0] + 1 - not_above
