"""What a request may do to logits before they are sampled: processors, biases, bans, penalties.

Each stage is one vectorised edit of the entries that it concerns, over all rows that ask for it;
a row that asks for nothing is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tpengine.layers.pending import Array, Pending
from tpengine.layers.token_counts import CountedTokens
from tpengine.layers.upload import upload
from tpengine.sampling_params import LogitsProcessor

_MAX_ENTRIES = 1 << 20
"""Entries that the penalties treat at once: bounds their temporaries to about 32 MiB."""


@dataclass(slots=True)
class Entries:
    """Single logits, by row and id, int64 `[num_entries]` each."""

    rows: torch.Tensor
    ids: torch.Tensor


@dataclass(slots=True)
class AllowedTokens:
    """The entries that stay, and the rows, each once, of which all others go."""

    rows: torch.Tensor
    entries: Entries


@dataclass(slots=True)
class Penalties:
    """Penalties of `n` rows.

    Attributes:
        rows: int64 `[n]`.
        tokens: distinct tokens of each row: with the prompt's where it penalises repetition.
        repetition, frequency, presence: float32 `[n]`; neutral is 1, 0, 0.
    """

    rows: torch.Tensor
    tokens: CountedTokens
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(slots=True)
class ProcessorCall:
    """The processors of one row and what they are told."""

    row: int
    processors: Sequence[LogitsProcessor]
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(slots=True)
class LogitEdits:
    """The edits of one step, in the order in which they are made.

    Attributes:
        processors: functions of the user, row by row.
        bias: entries, each once, and what is added to them, float32 `[num_entries]`.
        allowed: for rows that may sample some tokens only.
        banned: entries that become minus infinity.
    """

    processors: list[ProcessorCall] = field(default_factory=list)
    bias: tuple[Entries, torch.Tensor] | None = None
    allowed: AllowedTokens | None = None
    banned: list[Entries] = field(default_factory=list)
    penalties: Penalties | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no logit is touched."""
        return not (self.processors or self.bias or self.allowed or self.banned or self.penalties)


def apply_edits(logits: torch.Tensor, edits: LogitEdits) -> dict[int, str]:
    """Edits `logits` in place.

    Args:
        logits: `[num_rows, vocab_size]`, float32.

    Returns:
        By row, why it cannot be sampled: a processor failed.
    """
    errors = _run_processors(logits, edits.processors)
    if edits.bias is not None:
        entries, values = edits.bias
        logits[entries.rows, entries.ids] += values
    if edits.allowed is not None:
        at = (edits.allowed.entries.rows, edits.allowed.entries.ids)
        kept = logits[at]
        logits.index_fill_(0, edits.allowed.rows, -torch.inf)
        logits[at] = kept
    for banned in edits.banned:
        logits[banned.rows, banned.ids] = -torch.inf
    if edits.penalties is not None:
        apply_penalties(logits, edits.penalties)
    return errors


def find_lost_rows(
    logits: torch.Tensor, chosen: torch.Tensor, edits: LogitEdits, may_be_empty: torch.Tensor
) -> Pending[dict[int, str]]:
    """Rows of which the edits left nothing to sample, by row, with the reason.

    Args:
        logits: `[num_rows, vocab_size]`, edited.
        chosen: int64 `[num_rows]`: of a row that is lost, the sampler took a banned token or NaN.
        may_be_empty: bool `[num_rows]`, rows that are lost only where they are NaN: a beam that
            cannot go on is dropped by the search, as long as others can.
    """
    ruled = torch.zeros(len(chosen), dtype=torch.bool, device=logits.device)
    for entries in edits.banned:
        ruled[entries.rows] = True
    if edits.allowed is not None:
        ruled[edits.allowed.rows] = True
    if edits.processors:
        rows = np.array([call.row for call in edits.processors], np.int64)
        ruled[upload(rows, logits.device)] = True
    values = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    is_empty = ruled & values.isneginf() & ~may_be_empty
    return Pending([is_empty, ruled & values.isnan()], _reasons)


def _reasons(arrays: Sequence[Array]) -> dict[int, str]:
    is_empty, is_nan = arrays
    reason = (
        "no token can be sampled: allowed_token_ids, bad_words, min_tokens and logits processors "
        "together rule all of them out"
    )
    broken = "its logits are NaN; the model or a logits processor made them so"
    lost = np.flatnonzero(is_empty | is_nan).tolist()
    return {row: broken if is_nan[row] else reason for row in lost}


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Repetition penalty (Keskar et al. 2019), then frequency and presence, in place.

    A token that the output holds c times loses frequency x c + presence.
    """
    num_rows, width = penalties.tokens.ids.shape
    step = max(1, _MAX_ENTRIES // width)
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        at = (penalties.rows[part].unsqueeze(1), penalties.tokens.ids[part])
        counts = penalties.tokens.counts[part]
        repetition = penalties.repetition[part].unsqueeze(1)
        values = logits[at]
        values = torch.where(values < 0, values * repetition, values / repetition)
        values -= penalties.frequency[part].unsqueeze(1) * counts
        values -= penalties.presence[part].unsqueeze(1) * (counts > 0)
        logits[at] = values


def _run_processors(logits: torch.Tensor, calls: Sequence[ProcessorCall]) -> dict[int, str]:
    errors: dict[int, str] = {}
    for call in calls:
        row = logits[call.row]
        for processor in call.processors:
            # Lists and logits of its own: what a processor does to them concerns nobody else.
            ids: list[list[int]] = [list(call.output_ids)]
            if processor.wants_prompt:
                ids.insert(0, list(call.prompt_ids))
            try:
                edited = processor.function(*ids, row.clone())
                _check_edited(edited, row)
            except (Exception, SystemExit) as error:
                errors[call.row] = (
                    f"the logits processor {processor.path!r} failed: "
                    f"{type(error).__name__}: {error}"
                )
                break
            row.copy_(edited)
    return errors


def _check_edited(edited: object, row: torch.Tensor) -> None:
    if not isinstance(edited, torch.Tensor):
        raise TypeError(f"it must return the logits, got {type(edited).__name__}")
    if edited.shape != row.shape:
        raise ValueError(f"it must return {list(row.shape)} logits, got {list(edited.shape)}")
