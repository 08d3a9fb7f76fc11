"""What a pipeline stage exchanges with the others while it runs steps: hidden states come in and go
out, and the ids that the last stage samples come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tpengine.config import EngineConfig
from tpengine.distributed.parallel_state import Stage
from tpengine.layers.device_values import Int64
from tpengine.messages import StepInput


class StageEnds:
    """Both ends of this rank's stage. A stage alone exchanges nothing.

    Attributes:
        entering: memory for the hidden states of the stage before, `[max_num_batched_tokens,
            hidden_size]`; None: this is the first stage.
        num_bytes: of this memory.
    """

    def __init__(
        self, stage: Stage, config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stage = stage
        self.entering: torch.Tensor | None = None
        self.num_bytes = 0
        if not stage.is_first:
            shape = config.scheduler.max_num_batched_tokens, config.model.hidden_size
            self.entering = torch.zeros(shape, dtype=dtype, device=device)
            self.num_bytes = self.entering.nbytes

    def receive(self, num_tokens: int) -> torch.Tensor | None:
        """Waits for the hidden states of a step, `[num_tokens, hidden_size]`; None: this is the
        first stage."""
        source = self._stage.source
        if source is None or self.entering is None:
            return None
        return source.receive(self.entering[:num_tokens])

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Sends the hidden states of a step, `[num_tokens, hidden_size]`, to the next stage."""
        assert self._stage.target is not None, "no stage follows"
        self._stage.target.send(hidden)

    def send_ids(self, sampled_ids: Int64) -> None:
        """Tells the other stages what was sampled, int64 `[num_samples]`; at other ranks than the
        one that samples it does nothing."""
        if self._stage.is_last and len(sampled_ids):
            for link in self._stage.sampled:
                link.send(torch.from_numpy(sampled_ids))

    def ids_of(self, step: StepInput) -> Callable[[], Int64]:
        """Returns a function that waits for what a step samples. To be called in the order of the
        steps."""
        (sampled,) = self._stage.sampled
        ids = torch.empty(len(step.sample_slots), dtype=torch.int64)
        return lambda: sampled.receive(ids).numpy()

    def num_needed(self, pending: Sequence[StepInput], step: StepInput) -> int:
        """How many of the pending steps, oldest first, must be complete before a step is begun:
        those up to the last one that samples a token which the step computes, or that has drafts:
        which of these count must be known before a slot is used again. The parts of a prompt need
        none, and must not wait for any."""
        entered = {sequence.slot for sequence in step.new_sequences}
        needed = set(step.slots) - entered | {fork.parent_slot for fork in step.forks}
        needed |= {slot for slot, _ in step.token_overrides}
        # The driver has sent at most `stages + 1` unanswered steps, this one included. The ids of
        # older steps have arrived: they are sent before the answer.
        count = max(0, len(pending) - self._stage.count)
        for place, earlier in enumerate(pending, start=1):
            if earlier.drafts or not needed.isdisjoint(earlier.sample_slots):
                count = max(count, place)
        return count
