"""A small model that guesses the next tokens of sequences, beside the model that checks them.

It has a KV cache of its own, whose blocks have the numbers of the other cache: so a sequence's one
block table is for both, and blocks are copied and swapped together. A sequence that enters the
batch is computed from its beginning when it has drafts for the first time.

A draft is sampled with the noise that the token itself will be sampled with, which makes them agree
more often. Biases, bans, penalties and grammars are left out: a draft that they forbid is rejected.
"""

from __future__ import annotations

import numpy as np
import torch

from tpengine.distributed.parallel_state import ParallelState
from tpengine.layers import sampler
from tpengine.layers.device_values import Int32, Int64
from tpengine.messages import BlockMoves, StepInput
from tpengine.models.registry import CausalLM
from tpengine.worker.cache_engine import CacheEngine
from tpengine.worker.input_batch import InputBatch, upload_step
from tpengine.worker.recorder import Recorded


class DraftModel:
    """The model over its own cache, on CPU.

    Args:
        max_step_tokens: most tokens that it catches up with in a step.

    Attributes:
        num_computed_tokens: int32 `[max_num_seqs]`, tokens at the beginning of each slot's sequence
            whose K and V its cache holds.
    """

    def __init__(
        self,
        model: CausalLM,
        cache_engine: CacheEngine,
        recorded: Recorded | None,
        batch: InputBatch,
        parallel: ParallelState,
        max_step_tokens: int,
    ) -> None:
        self._model = model
        self._cache_engine = cache_engine
        self._recorded = recorded
        self._batch = batch
        self._parallel = parallel
        self._max_step_tokens = max_step_tokens
        self.num_computed_tokens = np.zeros(len(batch.num_tokens), np.int32)

    def apply(self, step: StepInput) -> None:
        """Follows the changes of a step, after `InputBatch.apply`."""
        computed = self.num_computed_tokens
        for sequence in step.new_sequences:
            computed[sequence.slot] = 0
        # What was computed of rejected drafts is computed again.
        np.minimum(computed, self._batch.num_tokens - 1, out=computed)
        for fork in step.forks:
            computed[fork.child_slot] = computed[fork.parent_slot]
        self._cache_engine.move(BlockMoves(copies=step.block_moves.copies), step.step)

    def guess(self, step: StepInput) -> list[int]:
        """Writes the drafts of a step into the batch, in place of those of the message; returns the
        slots for which it could not, because their sequences are not computed yet."""
        batch, computed = self._batch, self.num_computed_tokens
        slots = np.array([slot for slot, _ in step.drafts], np.int64)
        counts = np.array([len(drafts) for _, drafts in step.drafts])
        known = batch.num_tokens[slots]
        left = self._max_step_tokens
        for place in np.argsort(known - computed[slots], kind="stable").tolist():
            end = min(known[place] - 2, computed[slots[place]] + left)
            left -= self._catch_up(int(slots[place]), int(end))
        is_ready = computed[slots] >= known - 2
        behind: list[int] = slots[~is_ready].tolist()
        slots, counts, known = slots[is_ready], counts[is_ready], known[is_ready]
        # The last draft of the step before was not computed; if it came true, two tokens are new.
        num_new = known - computed[slots]
        for number in range(counts.max(initial=0)):
            chosen = counts > number
            own, ends = slots[chosen], (known + number)[chosen]
            sizes = num_new[chosen] if number == 0 else np.ones(len(own), np.int32)
            last = np.cumsum(sizes, dtype=np.int32) - 1
            positions = np.repeat(ends - 1 - last, sizes) + np.arange(sizes.sum(), dtype=np.int32)
            hidden = self._forward(np.repeat(own, sizes), positions)
            logits = self._model.compute_logits(hidden[torch.from_numpy(last)])
            batch.token_ids[own, ends] = self._sample(logits, own, ends)
            computed[own] = ends
        return behind

    def _catch_up(self, slot: int, end: int) -> int:
        """Computes the tokens of a sequence before `end`; returns how many it computed."""
        start = int(self.num_computed_tokens[slot])
        if start >= end:
            return 0
        arrays = self._batch.arrays([slot], [end - start], np.array([start], np.int32))
        token_ids, metadata = upload_step(arrays, self._batch.uploads)
        self._model.forward(token_ids, self._cache_engine.kv_caches, metadata)
        self.num_computed_tokens[slot] = end
        return end - start

    def _forward(self, slots: Int64, positions: Int32) -> torch.Tensor:
        """Computes the tokens at these positions; hidden states `[num_rows, hidden_size]`."""
        arrays = self._batch.arrays(slots, [1] * len(slots), positions)
        if self._recorded is not None and len(slots) <= self._recorded.max_rows:
            self._cache_engine.kv_caches.wait()
            self._recorded.write(arrays, self._batch.uploads)
            return self._recorded.run(len(slots))
        token_ids, metadata = upload_step(arrays, self._batch.uploads)
        return self._model.forward(token_ids, self._cache_engine.kv_caches, metadata)

    def _sample(self, logits: torch.Tensor, slots: Int64, positions: Int32) -> Int64:
        """Rank 0 samples; every rank returns the ids."""
        ids = torch.empty(len(slots), dtype=torch.int64)
        if self._parallel.tp_rank == 0:
            parameters = self._batch.sampling.gather_plain(slots, positions)
            ids = sampler.sample(logits, parameters).token_ids
        return self._parallel.broadcast(ids).numpy()
