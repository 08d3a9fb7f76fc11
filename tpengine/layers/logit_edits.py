"""What a request may do to its logits before sampling: processors, biases, masks, bans, penalties.

Each stage is one vectorised edit of the entries that it concerns, over all rows that ask for it; a
row that asks for nothing is not touched.

Penalties read `TokenCounts`: the *distinct* ids of each penalised sequence, and how often its
output contains each, kept on the device from step to step. A step adds one token per row, and
penalties touch these ids only, so the cost of both grows with the number of different tokens in a
sequence, not with the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tpengine.layers.device_values import Array, Int32, Int64, Pending, upload
from tpengine.messages import RowError
from tpengine.sampling_params import LoadedProcessor

MAX_ENTRIES = 1 << 20
"""Entries that penalties process at a time; bounds their temporary tensors to about 32 MiB."""
_MASK_S = 60.0
"""Longest wait for masks, which only a hang needs."""
BROKEN = RowError("its logits are NaN or infinite; the model or a logits processor made them so")
"""Of a row without a sound largest logit."""
_NO_ROW = -1
_NO_TOKEN = -1
_FIRST_ROWS = 8
_FIRST_WIDTH = 64
_SPARE_SHARE = 8
"""One column in eight is reserved as spare when rows grow."""


@dataclass(slots=True)
class CountedTokens:
    """Distinct tokens of some sequences, each `[num_sequences, width]`.

    A shorter sequence is filled up with repetitions of its first token and its count, so that an
    edit computed from them writes the same value to the same logit again.

    Attributes:
        ids: int64.
        counts: int32, occurrences in the output; 0 for a token that occurs only in the prompt.
    """

    ids: torch.Tensor
    counts: torch.Tensor


@dataclass(slots=True)
class Entries:
    """Single logits, by row and token id, each int64 `[num_entries]`."""

    rows: torch.Tensor
    ids: torch.Tensor


@dataclass(slots=True)
class AllowedTokens:
    """Rows, int64 `[num_rows]`, each once, of which only these entries stay."""

    rows: torch.Tensor
    entries: Entries


@dataclass(slots=True)
class Penalties:
    """Penalties of `n` rows.

    Attributes:
        rows: int64 `[n]`.
        tokens: distinct tokens of each row; with those of the prompt if it penalises repetition.
        repetition, frequency, presence: float32 `[n]`; neutral is 1, 0, 0.
    """

    rows: torch.Tensor
    tokens: CountedTokens
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(slots=True)
class ProcessorCall:
    """The logits processors of one row, and their arguments."""

    row: int
    processors: Sequence[LoadedProcessor]
    prompt_ids: list[int]
    output_ids: list[int]


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The allowed tokens of some sequences.

    Attributes:
        bits: int32 `[num_masks, ceil(vocab_size / 32)]`, a bit for each token, the lowest first.
        errors: by index of the mask, why there is none.
    """

    bits: Int32
    errors: dict[int, RowError]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Rows, int64 `[num_masks]`, in ascending order, that may sample only what their masks allow.

    Attributes:
        filling: makes the masks while the model runs.
    """

    rows: Int64
    filling: Future[FilledMasks]


@dataclass(slots=True)
class LogitEdits:
    """The edits of one step, in the order in which they are applied.

    Attributes:
        processors: functions of the users, one row each.
        bias: entries, each once, and the values added to them, float32 `[num_entries]`.
        allowed: of rows that may sample only certain tokens.
        masks: of rows whose output follows a grammar.
        banned: entries that become minus infinity.
    """

    processors: list[ProcessorCall] = field(default_factory=list)
    bias: tuple[Entries, torch.Tensor] | None = None
    allowed: AllowedTokens | None = None
    masks: TokenMasks | None = None
    banned: list[Entries] = field(default_factory=list)
    penalties: Penalties | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no logit changes."""
        stages = (self.processors, self.bias, self.allowed, self.masks, self.banned, self.penalties)
        return not any(stages)

    @property
    def only_ban(self) -> bool:
        """Whether they only rule tokens out, which no dtype rounds."""
        return not (self.processors or self.bias or self.penalties)


def apply_edits(logits: torch.Tensor, edits: LogitEdits) -> dict[int, RowError]:
    """Edits `logits` in place.

    Args:
        logits: `[num_rows, vocab_size]`, float32; or the model's dtype if the edits `only_ban`.

    Returns:
        For each row whose processor failed, or whose grammar cannot be followed, the reason.
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
    if edits.masks is not None:
        errors |= _apply_masks(logits, edits.masks)
    for banned in edits.banned:
        logits[banned.rows, banned.ids] = -torch.inf
    if edits.penalties is not None:
        apply_penalties(logits, edits.penalties)
    return errors


def _apply_masks(logits: torch.Tensor, masks: TokenMasks) -> dict[int, RowError]:
    """Bans what the masks do not allow; returns the errors by row."""
    filled = masks.filling.result(_MASK_S)
    # Eight tokens at a time: single bits would take three to four times as long.
    table = upload(_byte_penalties(), logits.device).to(logits.dtype)
    taken = upload(filled.bits.view(np.uint8), logits.device).int()
    penalties = F.embedding(taken, table).flatten(1)[:, : logits.shape[1]]
    if len(masks.rows) == len(logits):
        logits += penalties
    else:
        logits[upload(masks.rows, logits.device)] += penalties
    return {int(masks.rows[place]): error for place, error in filled.errors.items()}


@functools.cache
def _byte_penalties() -> npt.NDArray[np.float32]:
    """What each byte of a mask adds to eight logits: 0 where a bit is set, else minus infinity;
    `[256, 8]`."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(0), np.float32(-np.inf))


def find_lost_rows(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    logprobs: torch.Tensor,
    edits: LogitEdits,
    may_be_empty: torch.Tensor,
) -> Pending[dict[int, RowError]]:
    """Finds the rows of which the edits left no token to sample, or that hold NaN; the reason, by
    row.

    Args:
        logits: float32 `[num_rows, vocab_size]`, edited.
        chosen: int64 `[num_rows]`, sampled tokens; in a lost row this token is banned or NaN.
        logprobs: float32 `[num_rows]`, of these tokens; NaN if the largest logit is not finite.
        may_be_empty: bool `[num_rows]`, rows that are lost only if they are NaN: the search drops a
            beam that cannot continue while other beams can.
    """
    ruled = torch.zeros(len(chosen), dtype=torch.bool, device=logits.device)
    for entries in edits.banned:
        ruled[entries.rows] = True
    if edits.allowed is not None:
        ruled[edits.allowed.rows] = True
    if edits.masks is not None:
        ruled[upload(edits.masks.rows, logits.device)] = True
    if edits.processors:
        rows = np.array([call.row for call in edits.processors], np.int64)
        ruled[upload(rows, logits.device)] = True
    values = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    is_empty = ruled & values.isneginf() & ~may_be_empty
    is_nan = torch.where(ruled, values, logprobs).isnan()
    return Pending([is_empty, is_nan], functools.partial(_reasons, edits))


def _reasons(edits: LogitEdits, arrays: Sequence[Array]) -> dict[int, RowError]:
    is_empty, is_nan = arrays
    processed = {call.row for call in edits.processors}
    masked = set() if edits.masks is None else set(edits.masks.rows.tolist())
    reason = (
        "no token can be sampled: structured_outputs, allowed_token_ids, bad_words, min_tokens and "
        "logits processors together rule all of them out; relax at least one of these"
    )

    def empty(row: int) -> RowError:
        field = "structured_outputs" if row in masked else "allowed_token_ids"
        return RowError(reason, None if row in processed else field)

    lost = np.flatnonzero(is_empty | is_nan).tolist()
    return {row: BROKEN if is_nan[row] else empty(row) for row in lost}


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Applies repetition (Keskar et al. 2019), frequency and presence penalties in place.

    A token with c occurrences in the output loses frequency x c + presence.

    Args:
        logits: float32 `[num_rows, vocab_size]`.
    """
    num_rows, width = penalties.tokens.ids.shape
    step = max(1, MAX_ENTRIES // width)
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


def _run_processors(logits: torch.Tensor, calls: Sequence[ProcessorCall]) -> dict[int, RowError]:
    errors: dict[int, RowError] = {}
    for call in calls:
        row = logits[call.row]
        for processor in call.processors:
            # Each processor gets copies, because it may change its arguments.
            ids: list[list[int]] = [list(call.output_ids)]
            if processor.wants_prompt:
                ids.insert(0, list(call.prompt_ids))
            try:
                edited = processor.function(*ids, row.clone())
                _check_edited(edited, row)
                row.copy_(edited)  # fails for a tensor without data, such as one on device meta
            except (Exception, SystemExit) as error:
                errors[call.row] = RowError(
                    f"the logits processor {processor.name!r} failed: "
                    f"{type(error).__name__}: {error}"
                )
                break
    return errors


def _check_edited(edited: object, row: torch.Tensor) -> None:
    if not isinstance(edited, torch.Tensor):
        raise TypeError(f"it must return the logits, got {type(edited).__name__}")
    if edited.shape != row.shape:
        raise ValueError(f"it must return {list(row.shape)} logits, got {list(edited.shape)}")


class TokenCounts:
    """Tokens of each penalised sequence, one row each, in tensors that double when they are full.

    The first `write` allocates them. A row takes 12 bytes per column; there are at most twice as
    many rows as were needed, and about 2.3 times as many columns. So memory stays under 56 bytes x
    (most penalised sequences at once, at least 4) x (most distinct tokens of one of them, at least
    32), e.g. 5 MiB for 64 sequences of 1,300 distinct tokens. Memory is reused, and not freed.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._row_of_slot = np.full(max_num_seqs, _NO_ROW, np.int64)
        self._free_rows: list[int] = []
        # Upper bounds of the entries in use, by row. Only the device knows the exact numbers, and a
        # read would wait for the step that it computes now.
        self._bounds = np.zeros(0, np.int64)
        self._ids = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._counts = torch.empty((0, 0), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Device memory of the rows, in bytes."""
        return self._ids.nbytes + self._counts.nbytes

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is counted."""
        return len(self._free_rows) == len(self._bounds)

    def write(self, slot: int, prompt_ids: Int32, output_ids: Int32) -> None:
        """Sets a slot's row to the tokens of a sequence.

        Args:
            prompt_ids: int32, tokens that are stored with count 0.
            output_ids: int32, tokens that are counted.
        """
        ids = np.unique(np.concatenate([prompt_ids, output_ids]))
        counts = np.zeros(len(ids), np.int32)
        output, times = np.unique(output_ids, return_counts=True)
        counts[np.searchsorted(ids, output)] = times
        row = self._take_row(slot)
        self._reserve_width(len(ids))
        self._ids[row] = _NO_TOKEN
        self._counts[row] = 0
        self._ids[row, : len(ids)] = upload(ids.astype(np.int64), self._device)
        self._counts[row, : len(ids)] = upload(counts, self._device)
        self._bounds[row] = len(ids)

    def append(self, slots: Int64, token_ids: Int64, count_distinct: Callable[[int], int]) -> None:
        """Counts one more output token of each slot; slots without a row are skipped.

        Args:
            slots, token_ids: int64 `[num_slots]`.
            count_distinct: returns how many different tokens `write` would store for a slot,
                without this one; called rarely.
        """
        rows = self._row_of_slot[slots]
        counted = rows != _NO_ROW
        if not counted.any():
            return
        rows = rows[counted]
        width = self._room_for_one_more(slots[counted], rows, count_distinct)
        self._bounds[rows] += 1
        at = upload(rows, self._device)
        tokens = upload(token_ids[counted], self._device)
        columns = _places(self._ids[at, :width], tokens)
        self._ids[at, columns] = tokens
        self._counts[at, columns] += 1

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """Copies the parent's row to the child; clears the child if the parent has no row."""
        if self._row_of_slot[parent_slot] == _NO_ROW:
            self.clear(child_slot)
            return
        row = self._take_row(child_slot)
        parent = int(self._row_of_slot[parent_slot])
        for tensor in (self._ids, self._counts):
            tensor[row] = tensor[parent]
        self._bounds[row] = self._bounds[parent]

    def clear(self, slot: int) -> None:
        """Frees the slot's row, if it has one."""
        row = int(self._row_of_slot[slot])
        if row != _NO_ROW:
            self._row_of_slot[slot] = _NO_ROW
            self._bounds[row] = 0
            self._free_rows.append(row)

    def gather(self, slots: Int64, drafts: Iterable[tuple[Int64, Int64]] = ()) -> CountedTokens:
        """Returns the tokens of slots, each of which has a row.

        Args:
            drafts: (indexes in `slots`, a token for each), which are counted too, but not kept.
        """
        rows = self._row_of_slot[slots]
        width = max(1, int(self._bounds[rows].max()))
        at = upload(rows, self._device)
        ids, counts = self._ids[at, :width], self._counts[at, :width]
        for places, token_ids in drafts:
            ids, counts = F.pad(ids, (0, 1), value=_NO_TOKEN), F.pad(counts, (0, 1))
            own, tokens = upload(places, self._device), upload(token_ids, self._device)
            columns = _places(ids[own], tokens)
            ids[own, columns] = tokens
            counts[own, columns] += 1
        unused = ids == _NO_TOKEN
        # An empty row becomes id 0 with count 0, to which no penalty on output applies.
        ids = torch.where(unused, ids[:, :1], ids).clamp_(min=0)
        return CountedTokens(ids, torch.where(unused, counts[:, :1], counts))

    def _take_row(self, slot: int) -> int:
        row = int(self._row_of_slot[slot])
        if row != _NO_ROW:
            return row
        if not self._free_rows:
            self._add_rows()
        row = self._free_rows.pop()
        self._row_of_slot[slot] = row
        return row

    def _add_rows(self) -> None:
        num_rows, width = self._ids.shape
        more = min(max(_FIRST_ROWS, num_rows), len(self._row_of_slot) - num_rows)
        self._resize(num_rows + more, max(width, _FIRST_WIDTH))
        self._bounds = np.concatenate([self._bounds, np.zeros(more, np.int64)])
        self._free_rows = list(range(num_rows + more - 1, num_rows - 1, -1))

    def _room_for_one_more(self, slots: Int64, rows: Int64, count: Callable[[int], int]) -> int:
        """Makes sure that each row has a free column; returns the width that covers all rows."""
        width = self._ids.shape[1]
        if (self._bounds[rows] >= width).any():
            # The bounds are too high, because repeated tokens take no column. Counting is slow, so
            # it waits until a bound reaches the width. It covers all rows, because the highest
            # bound decides the width.
            self._bounds[rows] = [count(slot) for slot in slots.tolist()]
            # Spare columns, because a row that is nearly full would be counted in every step.
            self._reserve_width(int(self._bounds[rows].max()) + 1 + width // _SPARE_SHARE)
        return int(self._bounds[rows].max()) + 1

    def _reserve_width(self, width: int) -> None:
        num_rows, old = self._ids.shape
        if width > old:
            self._resize(num_rows, max(width, 2 * old))

    def _resize(self, num_rows: int, width: int) -> None:
        old_rows, old_width = self._ids.shape
        more = (0, width - old_width, 0, num_rows - old_rows)
        self._ids = F.pad(self._ids, more, value=_NO_TOKEN)
        self._counts = F.pad(self._counts, more)


def _places(ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The column of each row's token: its own one, or the first free one. int64 `[num_rows]`.

    Args:
        ids: `[num_rows, width]`, with a free column in each row.
        tokens: `[num_rows]`.
    """
    is_place = (ids == tokens.unsqueeze(1)) | (ids == _NO_TOKEN)
    return is_place.int().argmax(dim=1)
