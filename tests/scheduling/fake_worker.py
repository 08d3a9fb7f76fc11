"""A worker without tensors that knows only the messages it gets, and checks each of them.

Its cache holds one number per token place. What it samples depends on every number that it reads
through the block table, so a block that was lost, shared or reused too early changes the tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from tpengine.inputs import Adapter
from tpengine.messages import Candidates, NewSequence, StepInput, StepOutput

VOCAB_SIZE = 997
FAILING = b"f"
"""The digest of a picture that has no features."""


def mix(*values: int) -> int:
    """A number that depends on all of `values` and on their order; the same in each process."""
    return hash(values)


def key_of(previous_key: int, token_id: int) -> int:
    """What the cache holds for a token: it depends on all tokens up to it."""
    return mix(previous_key, token_id)


def sample(keys: list[int], seed: int, index: int) -> int:
    """The next token after a prefix with these keys."""
    return mix(seed, index, len(keys), *keys) % VOCAB_SIZE


def keys_of(token_ids: list[int], adapter: Adapter | None = None) -> list[int]:
    """What the cache holds for these tokens."""
    return keys_after(root_of(None if adapter is None else adapter.key), token_ids)


def keys_after(root: int, token_ids: list[int]) -> list[int]:
    """What the cache holds for tokens after `root`."""
    keys = [root]
    for token_id in token_ids:
        keys.append(key_of(keys[-1], token_id))
    return keys[1:]


def root_of(key: bytes | None) -> int:
    """The key before the first token: with another adapter all keys are others."""
    return 0 if key is None else mix(*key)


def candidates_after(keys: list[int], count: int) -> Candidates:
    """The likeliest continuations of a prefix with these keys, for beam search."""
    state = mix(len(keys), *keys)
    drawn = {}
    while len(drawn) < count:
        state = mix(state)
        # Multiples of 199 come often, so that tests which make them end tokens see beams end.
        token_id = state % VOCAB_SIZE if state >> 8 & 3 else 199 * (state % 6)
        drawn.setdefault(token_id, -((state >> 20) % 4096) / 512)
    ranked = sorted(drawn.items(), key=lambda item: -item[1])
    scores = [score for _, score in ranked]
    token_ids = [token_id for token_id, _ in ranked]
    return Candidates(token_ids, scores, scores, ranks=list(range(1, count + 1)))


def generate_undisturbed(
    prompt: list[int], seed: int, num_tokens: int, index: int = 0, adapter: Adapter | None = None
) -> list[int]:
    """What a sequence generates when it runs alone."""
    keys = keys_of(prompt, adapter)
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(sample(keys, seed, index))
        keys.append(key_of(keys[-1], output[-1]))
    return output


@dataclass
class _Slot:
    new: NewSequence
    index: int
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    num_drafts: int = 0


@dataclass
class FakeWorker:
    """Executes steps; raises AssertionError when a message breaks the contract."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0
    num_kept_tokens: int = sys.maxsize
    """As in the block manager: it reads no blocks of older tokens, which may hold anything."""
    slots: dict[int, _Slot] = field(default_factory=dict)
    cache: dict[int, int] = field(default_factory=dict)
    host: dict[int, int] = field(default_factory=dict)
    last_step: int = 0
    parents: dict[int, int] = field(default_factory=dict)
    max_loras: int = 0
    adapters: dict[int, bytes] = field(default_factory=dict)
    """Keys, by slot."""
    awaited: dict[bytes, int] = field(default_factory=dict)
    """Rows of the pictures whose features are not computed."""
    features: set[bytes] = field(default_factory=set)
    encoded: dict[int, list[int]] = field(default_factory=dict)
    """By seed of the request, the encoder prompt that was read."""
    moves_done: int = 0
    """As in the real cache: what a step that is sent again does not move again."""
    num_repeated: int = 0
    """Number of the last step that is sent again. Until then a later step that was done before may
    have overwritten what it takes from a sequence that has no row."""

    def apply(self, step: StepInput) -> None:
        """Applies what a step says about slots and blocks."""
        assert step.step == self.last_step + 1
        self.last_step = step.step
        self.move_blocks(step)
        self._load_adapters(step)
        self._take_pictures(step)
        for slot in step.freed_slots:
            del self.slots[slot]  # KeyError: freed twice, or never taken
        for new in step.new_sequences:
            assert new.slot not in self.slots
            assert 0 <= new.slot < self.max_num_seqs
            assert new.num_computed_tokens < len(new.token_ids)
            self.enter(new)
            if new.cross is not None and new.cross.token_ids:
                assert len(new.cross.token_ids) == new.cross.num_tokens
                self.encoded[new.seed] = new.cross.token_ids
                self.cache |= self._cross_places(new)
        self._fork(step)
        for slot, block_ids in step.new_block_ids:
            assert block_ids
            self.slots[slot].block_ids += block_ids
        for slot, place, block in step.replaced_block_ids:
            assert (self.slots[slot].block_ids[place], block) in step.block_moves.copies
            self.slots[slot].block_ids[place] = block
        for slot, token_id in step.token_overrides:
            self.slots[slot].token_ids[-1] = token_id
        checked = self.slots if step.step > self.num_repeated else dict.fromkeys(step.slots)
        for slot in map(self.slots.__getitem__, checked):
            kept = self._kept(slot)
            block_ids = slot.block_ids[kept.start // self.block_size :]
            assert len(set(block_ids)) == len(block_ids), "a block twice in a table"
            assert all(0 <= block < self.num_blocks for block in block_ids)
            expected = self._all_keys(slot, slot.num_computed_tokens)
            held = [self.cache.get(self._place(slot, p)) for p in kept]
            assert held == expected[kept.start :], "what was computed is no longer there"
            if (cross := slot.new.cross) is not None:
                assert not set(cross.block_ids) & set(slot.block_ids)
                places = self._cross_places(slot.new)
                assert len(places) == cross.num_tokens, "too few blocks of an encoder prompt"
                assert places.items() <= self.cache.items(), "what was read is no longer there"

    def enter(self, new: NewSequence) -> None:
        """Puts a sequence into its slot."""
        self.slots[new.slot] = _Slot(
            new, new.index, list(new.token_ids), new.num_computed_tokens, list(new.block_ids)
        )

    def compute(self, step: StepInput) -> StepOutput:
        """Computes the rows of an applied step and samples."""
        sizes, drafts = step.num_scheduled_tokens, dict(step.drafts)
        assert len(step.slots) == len(sizes)
        assert sizes or step.num_awaited_rows or step.block_moves, "a step without work"
        counts = {slot: 1 + len(drafts.get(slot, ())) for slot in dict.fromkeys(step.slots)}
        assert step.slots == [slot for slot, count in counts.items() for _ in range(count)]
        assert drafts.keys() <= counts.keys(), "drafts without a row"
        assert all(size >= 1 for size in sizes)
        assert sum(sizes) + step.num_encoder_tokens <= self.max_num_batched_tokens
        singles = sizes.count(1)
        assert all(size == 1 for size in sizes[:singles]), "rows with one token come first"
        expected = []
        written: set[int] = set()
        for row, (slot_id, size) in enumerate(zip(step.slots, sizes, strict=True)):
            slot = self.slots[slot_id]
            if step.slots[:row][-1:] == [slot_id]:
                slot.token_ids.append(drafts[slot_id][slot.num_drafts])
                slot.num_drafts += 1
            assert slot.num_computed_tokens + size <= len(slot.token_ids)
            places = self._write(slot_id, size)
            assert not places & written, "two rows write the same place"
            written |= places
            if slot.num_computed_tokens == len(slot.token_ids):
                expected += [(row, slot_id)]
                expected += [(row, c) for c, parent in self.parents.items() if parent == slot_id]
        assert list(zip(step.sample_rows, step.sample_slots, strict=True)) == expected
        for row, slot_id in expected:
            self.slots[slot_id].num_computed_tokens = self.slots[
                step.slots[row]
            ].num_computed_tokens
        output = StepOutput(step.step, [], load_results=self._computed_pictures(step))
        for place, slot_id in enumerate(step.sample_slots):
            if slot_id in drafts:
                self._verify(slot_id, place, output)
                continue
            count = self.slots[slot_id].new.num_candidates
            if count:
                output.candidates[place] = candidates_after(self._keys(slot_id), count)
            self._sample(slot_id, output)
            if not count and (token_id := output.token_ids[-1]) % 2:
                keys, slot = self._keys(slot_id), self.slots[slot_id]
                keys.append(key_of(keys[-1], token_id))
                output.forced[place] = [sample(keys, slot.new.seed, slot.index)]
        return output

    def _verify(self, slot_id: int, place: int, output: StepOutput) -> None:
        """Samples after the sequence's token, and after each of its drafts."""
        slot = self.slots[slot_id]
        if not slot.num_drafts:
            return  # done at its first place
        drafts = slot.token_ids[-slot.num_drafts :]
        del slot.token_ids[-slot.num_drafts :]
        slot.num_computed_tokens -= slot.num_drafts
        slot.num_drafts = 0
        self._sample(slot_id, output)
        for number, draft in enumerate(drafts, start=1):
            if draft == output.token_ids[-1] and output.rejected[-1:] != [place + number - 1]:
                slot.num_computed_tokens += 1
                self._sample(slot_id, output)
            else:
                output.rejected.append(place + number)
                output.token_ids.append(draft)
                output.chosen_logprobs.append(0.0)

    def move_blocks(self, step: StepInput, only_swaps: bool = False) -> None:
        """Copies blocks, as the first part of a step."""
        moves, size = step.block_moves, self.block_size
        assert not (moves.swap_outs and moves.swap_ins), "swapped in and out in one step"
        targets = [target for _, target in moves.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in moves.copies}
        for number, pairs, source_cache, target_cache in (
            (2 * step.step, moves.swap_outs, self.cache, self.host),
            (2 * step.step, moves.swap_ins, self.host, self.cache),
            (2 * step.step + 1, moves.copies, self.cache, self.cache),
        ):
            if not pairs or number <= self.moves_done or (only_swaps and number % 2):
                continue
            self.moves_done = number
            for source, target in pairs:
                for offset in range(size):
                    key = source_cache.get(source * size + offset)
                    if key is not None:
                        target_cache[target * size + offset] = key
        for pairs, which in ((moves.swap_outs, 1), (moves.swap_ins, 0)):
            assert all(0 <= pair[which] < self.num_host_blocks for pair in pairs)

    def _load_adapters(self, step: StepInput) -> None:
        kept = self.slots.keys() - set(step.freed_slots)
        used = {self.slots[slot].new.adapter_slot for slot in kept}
        for load in step.adapter_loads:
            assert 0 <= load.slot < self.max_loras
            assert load.slot not in used, "the slot of a running sequence gets another adapter"
            self.adapters[load.slot] = load.key

    def _take_pictures(self, step: StepInput) -> None:
        self.features.update(step.computed_pictures)
        for digest in step.dropped_pictures:
            self.features.discard(digest)
            self.awaited.pop(digest, None)
        for load in step.picture_loads:
            assert load.digest not in self.features | self.awaited.keys(), "computed twice"
            self.awaited[load.digest] = load.num_rows
        assert not step.num_awaited_rows or step.num_awaited_rows >= sum(self.awaited.values())

    def _computed_pictures(self, step: StepInput) -> dict[bytes, str | None]:
        """The first one is complete after some turns."""
        first = next(iter(self.awaited), None)
        if first is None or not step.num_awaited_rows or step.step % 3 == 0:
            return {}
        del self.awaited[first]
        return {first: "it was told to" if first == FAILING else None}

    def _root(self, slot: _Slot) -> int:
        place = slot.new.adapter_slot
        return root_of(None if place is None else self.adapters[place])  # KeyError: not loaded

    def _all_keys(self, slot: _Slot, num_tokens: int) -> list[int]:
        return keys_after(self._root(slot), slot.token_ids[:num_tokens])

    def _fork(self, step: StepInput) -> None:
        children = {fork.child_slot for fork in step.forks}
        assert len(children) == len(step.forks)
        self.parents = {}
        for fork in step.forks:
            assert fork.parent_slot not in children
            parent = self.slots[fork.parent_slot]
            if fork.child_slot not in self.slots:  # it is sampled from its parent's row
                self.parents[fork.child_slot] = fork.parent_slot
            self.slots[fork.child_slot] = _Slot(
                parent.new,
                fork.index,
                parent.token_ids.copy(),
                parent.num_computed_tokens,
                parent.block_ids.copy(),
            )

    def _write(self, slot_id: int, size: int) -> set[int]:
        slot = self.slots[slot_id]
        first = slot.num_computed_tokens
        places = set()
        for span in slot.new.pictures:
            is_used = span.start < first + size and first < span.end
            assert not is_used or span.digest in self.features, "features that are not there"
        for position in range(first, first + size):
            previous = self.cache[self._place(slot, position - 1)] if position else self._root(slot)
            key = key_of(previous, slot.token_ids[position])
            place = self._place(slot, position)
            self.cache[place] = key
            places.add(place)
        slot.num_computed_tokens += size
        blocks = {place // self.block_size for place in places}
        crosses = [s.new.cross.block_ids for s in self.slots.values() if s.new.cross is not None]
        assert all(blocks.isdisjoint(ids) for ids in crosses), "an encoder's block is written"
        for other_id, other in self.slots.items():
            if other_id != slot_id and not blocks.isdisjoint(other.block_ids):
                read = {self._place(other, p) for p in self._kept(other)}
                assert not read & places, "a block that others read is written"
        return places

    def _cross_places(self, new: NewSequence) -> dict[int, int]:
        """What the cache holds for an encoder prompt, by place."""
        keys, size = keys_after(mix(new.seed), self.encoded[new.seed]), self.block_size
        places = [block * size + offset for block in new.cross.block_ids for offset in range(size)]
        return dict(zip(places, keys, strict=False))

    def _kept(self, slot: _Slot) -> range:
        """Positions of the computed tokens that the next token sees."""
        num_computed = slot.num_computed_tokens
        return range(max(0, num_computed - self.num_kept_tokens), num_computed)

    def _keys(self, slot_id: int) -> list[int]:
        """Keys of all computed tokens, of which those that the last one sees are read."""
        slot = self.slots[slot_id]
        first = max(0, self._kept(slot).start - 1)
        read = [self.cache[self._place(slot, p)] for p in range(first, slot.num_computed_tokens)]
        return self._all_keys(slot, first) + read

    def _sample(self, slot_id: int, output: StepOutput) -> None:
        slot = self.slots[slot_id]
        token_id = sample(self._keys(slot_id), slot.new.seed, slot.index)
        slot.token_ids.append(token_id)
        output.token_ids.append(token_id)
        output.chosen_logprobs.append(-(mix(token_id, len(slot.token_ids)) % 1000) / 100)

    def _place(self, slot: _Slot, position: int) -> int:
        # IndexError: the table is too short.
        return slot.block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )
