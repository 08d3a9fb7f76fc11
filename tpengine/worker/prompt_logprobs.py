"""Log probabilities of the tokens of prompts, computed while the prompts are.

The last layer's output of a chunk is there anyway; its logits would be large (a prompt of 8,192
tokens and 128 k ids: 4 GiB in float32), so they are made in slices of a bounded number of rows,
the same number that the memory profile ran with. Nothing has to be reserved at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from tpengine.layers.device_values import Array, Pending, together, upload
from tpengine.layers.sampler import token_logprobs
from tpengine.messages import PromptLogprobs, StepInput
from tpengine.worker.input_batch import InputBatch

PROMPT_SLICE_ROWS = 32
"""A slice has at least this many rows (the step permitting): fewer would read the output head's
weights too often."""


@dataclass(slots=True)
class PromptRow:
    """The part of a prompt that a row of the step computes.

    Attributes:
        row: of the step.
        first_token: index of the part's first token among the step's tokens.
        first_position: position in the prompt of the first token that gets a log probability: the
            one after the part's first token.
        targets: int64, the tokens from `first_position` on.
        num_top: likeliest tokens to report at each position.
    """

    row: int
    first_token: int
    first_position: int
    targets: npt.NDArray[np.int64]
    num_top: int


def find_prompt_rows(step: StepInput, batch: InputBatch) -> list[PromptRow]:
    """Rows that compute prompt tokens whose successors' log probabilities are wanted.

    To be called before the step's tokens are booked.
    """
    wanted = batch.sampling.num_prompt_logprobs[step.slots]
    if (wanted < 0).all():
        return []
    ends = np.cumsum(step.num_scheduled_tokens)
    found = []
    for row in np.flatnonzero(wanted >= 0).tolist():
        slot, size = step.slots[row], step.num_scheduled_tokens[row]
        first = int(batch.num_computed_tokens[slot]) + 1
        last = min(first + size, int(batch.sampling.num_prompt_tokens[slot]))
        if first < last:
            targets = batch.token_ids[slot, first:last].astype(np.int64)
            start = int(ends[row]) - size
            found.append(PromptRow(row, start, first, targets, int(wanted[row])))
    return found


def compute_prompt_logprobs(
    hidden: torch.Tensor,
    rows: list[PromptRow],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    max_logits_rows: int,
) -> Pending[dict[int, PromptLogprobs]]:
    """Log probabilities by row of the step.

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
            raw = torch.log_softmax(logits.float(), dim=-1)
            num_top = [part.num_top] * len(targets)
            slices.append(token_logprobs(raw, upload(targets, raw.device), num_top))
        parts.append(together(slices))
    pending = together(parts)

    def read(arrays: Sequence[Array]) -> dict[int, PromptLogprobs]:
        return {
            part.row: PromptLogprobs(part.first_position, list(chain.from_iterable(entries)))
            for part, entries in zip(rows, pending.read(arrays), strict=True)
        }

    return Pending(pending.tensors, read)
