"""Which rows of a step that was begun early the driver still means."""

from __future__ import annotations

from tpengine.messages import StepInput


def still_good(slots: list[int], step: StepInput) -> dict[int, int]:
    """Which of the rows that were begun are rows of this step too: index by slot.

    Not those of which it changes anything but the blocks at the end.
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
