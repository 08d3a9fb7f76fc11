"""Steps that begin before the driver asks: while it looks at a step's tokens, the device already
runs the model on them.

Nothing is decided here. The K and V of a token that turns out to be one too many lie in a place
that nobody reads, since whoever computes that position writes it first; its hidden state is
dropped. Sampling waits for the driver's word. So tokens are those that would have come anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tpengine.messages import StepInput
from tpengine.worker.gpu.begun_rows import still_good


@dataclass(frozen=True, slots=True)
class BegunStep:
    """Rows of one token that were computed before the driver asked for them.

    Attributes:
        slots: of the rows.
        hidden: `[num_rows, hidden_size]`, valid until the model runs again.
        is_done: whether the device has finished them.
    """

    slots: list[int]
    hidden: torch.Tensor
    is_done: Callable[[], bool]


@dataclass(slots=True)
class Division:
    """What is left of a step of which some rows were computed before.

    Attributes:
        slots, num_scheduled_tokens: of the rows that are left.
        source: int64 `[num_tokens]`: where each of the step's tokens is among the rows that were
            computed before, followed by the tokens that are left; None: they are in their order.
    """

    slots: list[int]
    num_scheduled_tokens: list[int]
    source: npt.NDArray[np.int64] | None


def divide(step: StepInput, begun: BegunStep) -> Division:
    """Finds what a step still has to compute."""
    known = still_good(begun.slots, step)
    if len(known) == len(begun.slots) and begun.slots == step.slots:
        return Division([], [], None)
    left = Division([], [], None)
    source: list[int] = []
    num_tokens = len(begun.slots)
    for slot, size in zip(step.slots, step.num_scheduled_tokens, strict=True):
        if slot in known:
            source.append(known[slot])
            continue
        left.slots.append(slot)
        left.num_scheduled_tokens.append(size)
        source += range(num_tokens, num_tokens + size)
        num_tokens += size
    left.source = np.array(source, np.int64)
    return left
