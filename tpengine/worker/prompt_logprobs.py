"""Log probabilities of prompts: of which tokens they are wanted, and how they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from tpengine.layers import sampler
from tpengine.layers.device_values import Array, Int64, Pending, together, upload
from tpengine.layers.sampler import Filters
from tpengine.messages import NewSequence, PromptLogprobs, StepInput
from tpengine.worker.input_batch import InputBatch

PROMPT_SLICE_ROWS = 32
"""Least number of rows of a slice of a prompt whose log probabilities are wanted, if the step has
as many tokens. Fewer would read the output head's weights too often."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """The part of a prompt that a row of a step computes and that log probabilities are wanted for.

    Attributes:
        row: of the step.
        first_token: index of the part's first token among the step's tokens.
        first_position: position in the prompt of the first token that gets a log probability: the
            one after the part's first token.
        targets: int64, the prompt's tokens from `first_position` on.
        num_top: likeliest tokens to report at each position.
        filters: see `SamplingBatch.filters`, `[1]` each; None: they are of the raw logits.
    """

    row: int
    first_token: int
    first_position: int
    targets: Int64
    num_top: int
    filters: Filters | None = None


class PromptLogprobSlots:
    """The slots whose requests ask for log probabilities of their prompts.

    Args:
        processed: whether they are those of the processed logits.
    """

    def __init__(self, processed: bool) -> None:
        self._processed = processed
        self._sequences: dict[int, NewSequence] = {}

    def apply(self, step: StepInput) -> None:
        """Takes the sequences that enter, and forgets those that leave."""
        for slot in step.freed_slots:
            self._sequences.pop(slot, None)
        for sequence in step.new_sequences:
            if sequence.rules.prompt_logprobs is not None:
                self._sequences[sequence.slot] = sequence

    def rows(self, step: StepInput, batch: InputBatch) -> list[PromptRow]:
        """Finds the rows that compute prompt tokens whose successors' log probabilities are wanted.
        To be called before `InputBatch.note_computed`."""
        if not self._sequences:
            return []
        ends = np.cumsum(step.num_scheduled_tokens)
        rows = []
        for row, (slot, size) in enumerate(zip(step.slots, step.num_scheduled_tokens, strict=True)):
            sequence = self._sequences.get(slot)
            if sequence is None:
                continue
            first = int(batch.num_computed_tokens[slot]) + 1
            last = min(first + size, sequence.num_prompt_tokens)
            if first < last:
                targets = batch.token_ids[slot, first:last].astype(np.int64)
                start, num_top = int(ends[row]) - size, sequence.rules.prompt_logprobs or 0
                filters = None
                if self._processed:
                    filters = [column[slot : slot + 1] for column in batch.sampling.filters]
                rows.append(PromptRow(row, start, first, targets, num_top, filters))
        return rows


def compute_prompt_logprobs(
    hidden: torch.Tensor,
    rows: list[PromptRow],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    max_logits_rows: int,
) -> Pending[dict[int, PromptLogprobs]]:
    """Computes log probabilities of prompts, by row of the step.

    Logits of a whole prompt are large (8,192 tokens and 128 k ids: 4 GiB in float32). They are
    made in slices of at most as many rows as the memory profile ran with.

    Args:
        hidden: `[num_tokens, hidden_size]`, the last layer's output for the step's tokens.
        max_logits_rows: rows of logits that are held at once.
    """
    parts = []
    for part in rows:
        slices = []
        for start in range(0, len(part.targets), max_logits_rows):
            targets = part.targets[start : start + max_logits_rows]
            first = part.first_token + start
            logits = compute_logits(hidden[first : first + len(targets)])
            if not len(logits):  # on all ranks but the first
                continue
            if part.filters is None:
                shares = torch.log_softmax(logits.float(), dim=-1)
            else:
                filters = [column.repeat(len(targets)) for column in part.filters]
                shares = sampler.processed_logprobs(logits, filters)
            num_top = [part.num_top] * len(targets)
            slices.append(sampler.token_logprobs(shares, upload(targets, shares.device), num_top))
        parts.append(together(slices))
    pending = together(parts)

    def read(arrays: Sequence[Array]) -> dict[int, PromptLogprobs]:
        return {
            part.row: PromptLogprobs(part.first_position, list(chain.from_iterable(entries)))
            for part, entries in zip(rows, pending.read(arrays), strict=True)
        }

    return Pending(pending.tensors, read)
