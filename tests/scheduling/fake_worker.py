"""A worker without tensors that believes only the messages it gets, and checks each of them.

Its cache holds one number per token place. What it samples depends on every number that it reads
through the block table, so a block that was lost, shared or reused too early changes the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tpengine.messages import NewSequence, StepInput, StepOutput

VOCAB_SIZE = 997


def mix(*values: int) -> int:
    """A number that depends on all of `values` and on their order."""
    state = 1469598103934665603
    for value in values:
        state = ((state ^ (value + 1)) * 1099511628211) % 2**61
    return state


def key_of(previous_key: int, token_id: int) -> int:
    """What the cache holds for a token: it depends on all tokens up to it."""
    return mix(previous_key, token_id)


def sample(keys: list[int], seed: int, index: int) -> int:
    """The next token after a prefix with these keys."""
    return mix(seed, index, len(keys), *keys) % VOCAB_SIZE


def generate_undisturbed(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """What a request generates when it is alone in the world."""
    keys: list[int] = []
    for token_id in prompt:
        keys.append(key_of(keys[-1] if keys else 0, token_id))
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(sample(keys, seed, 0))
        keys.append(key_of(keys[-1], output[-1]))
    return output


@dataclass
class _Slot:
    new: NewSequence
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]


@dataclass
class FakeWorker:
    """Executes steps; raises AssertionError when a message breaks the contract."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    slots: dict[int, _Slot] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    last_step: int = 0

    def apply(self, step: StepInput) -> None:
        """Books what a step says about slots and blocks."""
        assert step.step == self.last_step + 1
        self.last_step = step.step
        for slot in step.freed_slots:
            del self.slots[slot]  # KeyError: freed twice, or never taken
        for new in step.new_sequences:
            assert new.slot not in self.slots
            assert 0 <= new.slot < self.max_num_seqs
            assert new.num_computed_tokens == 0
            self.slots[new.slot] = _Slot(new, list(new.token_ids), 0, list(new.block_ids))
        for slot, block_ids in step.new_block_ids:
            assert block_ids
            self.slots[slot].block_ids += block_ids
        held = [block for slot in self.slots.values() for block in slot.block_ids]
        assert len(set(held)) == len(held), "a block is in two tables"
        assert all(0 <= block < self.num_blocks for block in held)

    def compute(self, step: StepInput) -> StepOutput:
        """Computes the rows of an applied step and samples."""
        sizes = step.num_scheduled_tokens
        assert len(step.slots) == len(sizes) == len(set(step.slots)) > 0
        assert all(size >= 1 for size in sizes)
        assert sum(sizes) <= self.max_num_batched_tokens
        singles = sizes.count(1)
        assert all(size == 1 for size in sizes[:singles]), "rows with one token come first"
        complete = []
        for row, (slot_id, size) in enumerate(zip(step.slots, sizes, strict=True)):
            slot = self.slots[slot_id]
            assert slot.num_computed_tokens + size <= len(slot.token_ids)
            self._write(slot, size)
            if slot.num_computed_tokens == len(slot.token_ids):
                complete.append(row)
        assert step.sample_rows == complete
        assert step.sample_slots == [step.slots[row] for row in complete]
        return StepOutput(step.step, [self._sample(slot_id) for slot_id in step.sample_slots])

    def _write(self, slot: _Slot, size: int) -> None:
        first = slot.num_computed_tokens
        for position in range(first, first + size):
            previous = self.cache[self._place(slot, position - 1)] if position else 0
            key = key_of(previous, slot.token_ids[position])
            self.cache[self._place(slot, position)] = key
        slot.num_computed_tokens += size

    def _sample(self, slot_id: int) -> int:
        slot = self.slots[slot_id]
        keys = [self.cache[self._place(slot, p)] for p in range(slot.num_computed_tokens)]
        token_id = sample(keys, slot.new.seed, slot.new.index)
        slot.token_ids.append(token_id)
        return token_id

    def _place(self, slot: _Slot, position: int) -> int:
        # IndexError: the table is too short.
        return slot.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
