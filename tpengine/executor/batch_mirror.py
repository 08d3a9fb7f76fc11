"""What the ranks' batch holds after the last answered step, as the driver knows it by the messages.

If a rank is lost, steps without an answer have changed the batches of some ranks and not of others.
All of them then get this one in full, and the same steps again; see `worker/input_batch.py` for
what a message does to a batch.
"""

from __future__ import annotations

from dataclasses import replace

from tpengine.messages import NewSequence, StepInput, StepOutput


class BatchMirror:
    """Follows the steps that were answered.

    Attributes:
        num_steps: that were answered since the last `clear`.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._slots: dict[int, NewSequence] = {}

    def clear(self) -> None:
        """Forgets the batch: the ranks have new ones, which are empty."""
        self.num_steps = 0
        self._slots.clear()

    def sequences(self) -> list[NewSequence]:
        """The sequences in the batch, as they would enter another one."""
        return list(self._slots.values())

    def follow(self, step: StepInput, answer: StepOutput) -> None:
        """Notes what a step has changed.

        Args:
            answer: of the rank that samples.
        """
        self.num_steps += 1
        self._apply(step)
        self._compute(step)
        self._append(step, answer)

    def _apply(self, step: StepInput) -> None:
        slots = self._slots
        for slot in step.freed_slots:
            slots.pop(slot, None)
        for new in step.new_sequences:
            slots[new.slot] = own = _copy(new)
            if new.cross is not None:
                own.cross = replace(new.cross, token_ids=[], features=b"")
        for fork in step.forks:
            child = _copy(slots[fork.parent_slot])
            child.slot, child.index = fork.child_slot, fork.index
            slots[fork.child_slot] = child
        for slot, block_ids in step.new_block_ids:
            slots[slot].block_ids += block_ids
        for slot, place, block_id in step.replaced_block_ids:
            slots[slot].block_ids[place] = block_id
        for slot, token_id in step.token_overrides:
            slots[slot].token_ids[-1] = token_id

    def _compute(self, step: StepInput) -> None:
        # A draft has a row of its own, and counts only if it came true.
        sizes = dict(zip(reversed(step.slots), reversed(step.num_scheduled_tokens), strict=True))
        for slot, size in sizes.items():
            self._slots[slot].num_computed_tokens += size
        for row, slot in zip(step.sample_rows, step.sample_slots, strict=True):
            parent = self._slots[step.slots[row]]
            self._slots[slot].num_computed_tokens = parent.num_computed_tokens

    def _append(self, step: StepInput, answer: StepOutput) -> None:
        rejected, begun = set(answer.rejected), set[int]()
        for index, (slot, token_id) in enumerate(
            zip(step.sample_slots, answer.token_ids, strict=True)
        ):
            if index not in rejected:
                sequence = self._slots[slot]
                sequence.token_ids.append(token_id)
                sequence.num_computed_tokens += slot in begun  # a draft that came true
            begun.add(slot)


def _copy(sequence: NewSequence) -> NewSequence:
    """A copy whose lists may be changed."""
    token_ids, block_ids = sequence.token_ids.copy(), sequence.block_ids.copy()
    return replace(sequence, token_ids=token_ids, block_ids=block_ids)
