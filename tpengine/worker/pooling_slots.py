"""Hidden states that stand for prompts: the first one, the last one, or the mean of all.

A prompt may be computed in parts, so that sums and first states are kept by slot until its end.
They are float64: then the parts of a prompt do not change the float32 mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpengine.config import EngineConfig
from tpengine.layers.device_values import Int64
from tpengine.layers.sampler import Findings
from tpengine.messages import StepInput
from tpengine.models.registry import CausalLM
from tpengine.worker.input_batch import InputBatch
from tpengine.worker.transfers import Downloads


class PoolingSlots:
    """Pools the prompts of the running batch, and has the model's head make their outputs."""

    def __init__(self, config: EngineConfig, model: CausalLM, device: torch.device) -> None:
        pooling = config.model.pooling
        assert pooling is not None
        self._pooling, self._choice_ids = pooling.pooling, pooling.choice_ids
        self._model = model
        self._max_num_seqs = config.scheduler.max_num_seqs
        num_kept = self._max_num_seqs if self.wants_all else 0
        size = num_kept, config.model.hidden_size
        self._states = torch.zeros(size, dtype=torch.float64, device=device)

    @property
    def wants_all(self) -> bool:
        """Whether it reads the hidden states of all tokens of a step, not only the last."""
        return self._pooling != "last"

    def start(
        self, step: StepInput, batch: InputBatch, hidden: Tensor, downloads: Downloads
    ) -> Callable[[], list[Any]]:
        """Starts the copy of what the model gives for the prompts that end with this step; returns
        what waits for it, see `PendingAnswer.read`. To be called before
        `InputBatch.note_computed`.

        Args:
            hidden: `[num_tokens, hidden_size]`, or with the pooling last those of the last tokens.
        """
        wait = downloads.start([self._outputs(step, batch, hidden)])
        no_ids = np.zeros(len(step.sample_slots), np.int64)

        def read() -> list[Any]:
            (rows,) = wait()
            pooled = {i: row.tobytes() for i, row in enumerate(rows)}
            return [no_ids, Findings(), {}, pooled]

        return read

    def _outputs(self, step: StepInput, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Returns the outputs of the prompts that end, float32 `[num_samples, num_outputs]`."""
        pooled = self._pool(step, batch, hidden) if self.wants_all else hidden
        if not step.sample_rows:
            return pooled.new_empty(0, 1, dtype=torch.float32)
        return self._head(pooled, hidden.dtype)

    def run_dummy(self, hidden: Tensor) -> None:
        """Makes outputs of as many prompts as may end in a step, of any hidden states
        `[num_tokens, hidden_size]`."""
        self._head(hidden[: self._max_num_seqs], hidden.dtype)

    def _head(self, pooled: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._choice_ids:
            return self._model.compute_outputs(pooled.float()).float()
        logits = self._model.compute_logits(pooled.to(dtype)).float()
        no, yes = self._choice_ids
        return logits[:, yes : yes + 1] - logits[:, no : no + 1]

    def _pool(self, step: StepInput, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Returns what stands for the prompts that end, float32 `[num_samples, hidden_size]`."""
        slots = np.array(step.slots, np.int64)
        sizes = np.array(step.num_scheduled_tokens, np.int64)
        starts = batch.num_computed_tokens[slots].astype(np.int64)
        if self._pooling == "cls":
            self._keep_first(slots, sizes, starts, hidden, batch)
        else:
            self._add(slots, sizes, starts, hidden)
        ended = np.array(step.sample_rows, np.int64)
        places, lengths = batch.uploads.send([slots[ended], (starts + sizes)[ended]])
        pooled = self._states[places]
        return pooled / lengths.unsqueeze(1) if self._pooling == "mean" else pooled

    def _keep_first(
        self, slots: Int64, sizes: Int64, starts: Int64, hidden: Tensor, batch: InputBatch
    ) -> None:
        begins = np.flatnonzero(starts == 0)
        if len(begins):
            first = np.cumsum(sizes) - sizes
            rows, places = batch.uploads.send([first[begins], slots[begins]])
            self._states[places] = hidden[rows].double()

    def _add(self, slots: Int64, sizes: Int64, starts: Int64, hidden: Tensor) -> None:
        ends = np.cumsum(sizes)
        columns = (column.tolist() for column in (slots, sizes, starts, ends))
        for slot, size, start, end in zip(*columns, strict=True):
            own = hidden[end - size : end].sum(0, dtype=torch.float64)
            if start:
                self._states[slot] += own
            else:
                self._states[slot] = own
