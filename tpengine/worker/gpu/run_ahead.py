"""Begins the likely next step on a GPU while the driver still looks at the tokens of this one.

`RunAhead` puts the stages of `ModelRunner` together as `ModelRunner.execute` does, and adds one:
after it has sampled, it runs the model on the sampled ids, which only the device knows yet.

It decides nothing. If a token turns out to be one too many, its K and V lie in a slot that is
written again before it is read, and its hidden state is dropped. Sampling waits for the driver's
next message, so tokens do not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tpengine.distributed.parallel_state import end_of_work
from tpengine.layers.attention import keep_rows
from tpengine.layers.device_values import Int64
from tpengine.messages import StepInput, StepOutput
from tpengine.worker.model_runner import ModelRunner


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
    """What is left to compute of a step of which some rows were begun.

    Attributes:
        slots, num_scheduled_tokens: of the rows that are left.
        source: int64 `[num_tokens]`, index of each of the step's tokens among the rows that
            were begun, followed by the tokens that are left; None: the step is what was begun.
    """

    slots: list[int]
    num_scheduled_tokens: list[int]
    source: Int64 | None


class RunAhead:
    """Executes steps with a model runner, one step ahead of the driver."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._begun: BegunStep | None = None
        self._answered_at = 0.0

    def execute(self, step: StepInput) -> StepOutput:
        """See `ModelRunner.execute`."""
        runner = self._runner
        begun, self._begun = self._begun, None
        runner.apply(step)
        samples = runner.prepare_samples(step)
        start = time.perf_counter()
        if begun is None:
            forward = runner.prepare_rows(step.slots, step.num_scheduled_tokens, samples.wanted)
            hidden = forward()
        else:
            if not begun.is_done():
                start = self._answered_at  # the device has worked on it since the last answer
            hidden = keep_rows(self._complete(step, begun), samples.wanted)
        answer = runner.sample(step, samples, hidden)
        if step.next_slots and answer.token_ids is not None:
            self._begun = self._begin_next(step, answer.token_ids)
        output = runner.append(step, answer, start)
        self._answered_at = start + output.model_s
        return output

    def _complete(self, step: StepInput, begun: BegunStep) -> torch.Tensor:
        """Computes what is left of a step; hidden states `[num_tokens, hidden_size]`."""
        left, hidden = divide(step, begun), begun.hidden
        if left.slots:
            hidden = hidden.clone()  # a graph writes its next result to the same memory
            forward = self._runner.prepare_rows(left.slots, left.num_scheduled_tokens)
            hidden = torch.cat([hidden, forward()])
        if left.source is None:
            return hidden
        return hidden.index_select(0, self._runner.uploads.send([left.source])[0])

    def _begin_next(self, step: StepInput, token_ids: torch.Tensor) -> BegunStep:
        """Runs the model on what was just sampled.

        Args:
            token_ids: int64 `[num_samples]`, in the order of `step.sample_slots`.
        """
        if step.next_slots != step.sample_slots:
            places = {slot: place for place, slot in enumerate(step.sample_slots)}
            chosen = np.array([places[slot] for slot in step.next_slots])
            token_ids = token_ids.index_select(0, self._runner.uploads.send([chosen])[0])
        ones = [1] * len(step.next_slots)
        forward = self._runner.prepare_rows(step.next_slots, ones, token_ids=token_ids)
        hidden = forward()
        return BegunStep(step.next_slots.copy(), hidden, end_of_work(self._runner.device))


def divide(step: StepInput, begun: BegunStep) -> Division:
    """Finds what a step still has to compute."""
    valid = valid_rows(begun.slots, step)
    if len(valid) == len(begun.slots) and begun.slots == step.slots:
        return Division([], [], None)
    left = Division([], [], None)
    source: list[int] = []
    num_tokens = len(begun.slots)
    for slot, size in zip(step.slots, step.num_scheduled_tokens, strict=True):
        if slot in valid:
            source.append(valid[slot])
            continue
        left.slots.append(slot)
        left.num_scheduled_tokens.append(size)
        source += range(num_tokens, num_tokens + size)
        num_tokens += size
    left.source = np.array(source, np.int64)
    return left


def valid_rows(slots: list[int], step: StepInput) -> dict[int, int]:
    """Finds the rows that were begun and are rows of this step too: index by slot.

    A row is valid unless the step changes its slot by more than new blocks at the end.
    """
    changed = set(step.freed_slots)
    changed.update(sequence.slot for sequence in step.new_sequences)
    changed.update(fork.child_slot for fork in step.forks)
    changed.update(slot for slot, _ in step.token_overrides)
    changed.update(slot for slot, _, _ in step.replaced_block_ids)
    sizes = dict(zip(step.slots, step.num_scheduled_tokens, strict=True))
    return {
        slot: index
        for index, slot in enumerate(slots)
        if slot not in changed and sizes.get(slot) == 1
    }
