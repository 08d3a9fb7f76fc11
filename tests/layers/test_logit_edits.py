"""Edits of the logits of mixed batches against transformers' processors and plain NumPy."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import logits_processors
from support.edited_logits import END_TOKEN_ID, edited

from tpengine.layers import logit_edits
from tpengine.layers.logit_edits import FilledMasks, TokenMasks, apply_edits
from tpengine.layers.sampler import noise_keys, sample
from tpengine.messages import NewSequence, SamplingRules
from tpengine.worker.sampling_state import SamplingSlots

VOCAB_SIZE = 97
MAX_NUM_SEQS = 16
MAX_LEN = 120


@dataclass
class _Sequence:
    params: SamplingRules
    token_ids: list[int]
    num_prompt_tokens: int


class _Batch:
    """Slots as in the worker, and the sequences that they are expected to hold."""

    def __init__(self, processed: bool = False) -> None:
        self.slots = SamplingSlots(MAX_NUM_SEQS, torch.device("cpu"), processed)
        self.token_ids = np.zeros((MAX_NUM_SEQS, MAX_LEN), np.int32)
        self.sequences: dict[int, _Sequence] = {}

    def enter(self, slot: int, sequence: _Sequence) -> None:
        params, ids = sequence.params, sequence.token_ids
        ends = [END_TOKEN_ID] if params.min_tokens else []
        new = NewSequence(slot, ids, sequence.num_prompt_tokens, 0, [], params, 0, 0, ends)
        self.token_ids[slot, : len(ids)] = ids
        self.slots.write(slot, new, noise_keys(0, 0))
        self.sequences[slot] = sequence

    def leave(self, slot: int) -> None:
        self.slots.edits.clear(slot)
        del self.sequences[slot]

    def fork(self, parent: int, child: int) -> None:
        """Forks a sequence as the worker does."""
        if child in self.sequences:
            self.leave(child)
        self.token_ids[child] = self.token_ids[parent]
        self.slots.fork(parent, child, noise_keys(0, 1))
        old = self.sequences[parent]
        self.sequences[child] = _Sequence(old.params, list(old.token_ids), old.num_prompt_tokens)

    def override(self, slot: int, token_id: int) -> None:
        sequence = self.sequences[slot]
        sequence.token_ids[-1] = token_id
        count = len(sequence.token_ids)
        self.token_ids[slot, count - 1] = token_id
        self.slots.edits.rewrite(slot, self.token_ids[slot, :count])

    def append(self, slots: list[int], tokens: list[int]) -> None:
        num_tokens = np.zeros(MAX_NUM_SEQS, np.int32)
        for slot, token_id in zip(slots, tokens, strict=True):
            ids = self.sequences[slot].token_ids
            num_tokens[slot] = len(ids)
            self.token_ids[slot, len(ids)] = token_id
            ids.append(token_id)
        self.slots.edits.append(np.array(slots), np.array(tokens), self.token_ids, num_tokens)

    def gather(self, slots: list[int]):
        positions = [len(self.sequences[slot].token_ids) for slot in slots]
        return self.slots.gather(np.array(slots), np.array(positions, np.int32), self.token_ids)


def _random_params(rng: random.Random) -> SamplingRules:
    def maybe(value, neutral):
        return value if rng.random() < 0.4 else neutral

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]

    return SamplingRules(
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.3, 2), 1.0),
        logit_bias=maybe({i: rng.uniform(-9, 9) for i in ids(1, 9)}, None),
        bad_words_token_ids=maybe([ids(1, 3) for _ in range(rng.randint(1, 40))], ()),
        allowed_token_ids=maybe(ids(1, 20), None),
        min_tokens=maybe(rng.randint(1, 12), 0),
    )


def test_mixed_batches_equal_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_edits, "MAX_ENTRIES", 128)  # more than one part per step
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    batch, events = _Batch(), Counter()
    for _ in range(150):
        slot = rng.randrange(MAX_NUM_SEQS)
        event = rng.choice(["enter", "enter", "leave", "fork", "override", "nothing"])
        held = list(batch.sequences)
        if event == "enter":
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
            # Some enter with output, as after preemption.
            output = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 9]))]
            batch.enter(slot, _Sequence(_random_params(rng), prompt + output, len(prompt)))
        elif event == "leave" and slot in batch.sequences:
            batch.leave(slot)
        elif event == "fork" and held and (parent := rng.choice(held)) != slot:
            batch.fork(parent, slot)
        elif event == "override" and held:
            chosen = batch.sequences[parent := rng.choice(held)]
            if len(chosen.token_ids) > chosen.num_prompt_tokens:
                batch.override(parent, rng.randrange(VOCAB_SIZE))
        events[event] += 1
        for _ in range(2):  # the second call reuses the tensors of the first
            slots = [s for s in batch.sequences if len(batch.sequences[s].token_ids) < MAX_LEN]
            if not slots:
                continue
            logits = torch.randn(len(slots), VOCAB_SIZE, generator=generator) * 5
            held = [batch.sequences[slot] for slot in slots]
            expected = [
                edited(sequence.params, sequence.token_ids, sequence.num_prompt_tokens, row)
                for sequence, row in zip(held, logits, strict=True)
            ]
            edits = batch.gather(slots).edits
            actual = logits.clone()
            if edits is not None:
                apply_edits(actual, edits)
            torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=0, atol=1e-4)
            events["edited"] += int((actual != logits).any(dim=1).sum())
            events["banned"] += int(actual.isneginf().any(dim=1).sum())
            batch.append(slots, [rng.randrange(VOCAB_SIZE) for _ in slots])
    assert min(events.values()) > 10, events
    assert events["edited"] > 500


def test_drafts_are_edited_as_if_they_had_come_true() -> None:
    """Penalties, bad words and min_tokens after each draft; nothing of it stays."""
    rules = SamplingRules(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        bad_words_token_ids=[[5, 9], [1]],
        min_tokens=3,
    )
    batch, drafts = _Batch(), [5, 5, 8]
    for slot in (0, 1):
        batch.enter(slot, _Sequence(rules, [1, 2, 5], 2))
    logits = torch.randn(
        2 * len(drafts) + 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)
    )
    slots = [0] * (len(drafts) + 1) + [1] * (len(drafts) + 1)
    for slot in (0, 1):
        batch.token_ids[slot, 3 : 3 + len(drafts)] = drafts
    positions = np.array([3, 4, 5, 6] * 2, np.int32)
    ahead = batch.slots.gather(np.array(slots), positions, batch.token_ids).edits
    actual = logits.clone()
    apply_edits(actual, ahead)
    for number in range(len(drafts) + 1):
        edits = batch.gather([0, 1]).edits
        expected = logits[[number, number + 4]]
        apply_edits(expected, edits)
        assert torch.equal(actual[[number, number + 4]], expected), f"after {number} drafts"
        if number < len(drafts):
            batch.append([0, 1], [drafts[number]] * 2)


def test_without_edits_nothing_is_gathered() -> None:
    batch = _Batch()
    for slot in range(4):
        batch.enter(slot, _Sequence(SamplingRules(temperature=0), [1, 2, 3], 3))
    batch.append([0, 1, 2, 3], [5, 6, 7, 8])
    gathered = batch.gather([0, 1, 2, 3])
    assert gathered.edits is None
    logits = torch.randn(4, VOCAB_SIZE)
    before = logits.clone()
    assert sample(logits, gathered).token_ids.tolist() == before.argmax(dim=1).tolist()
    assert torch.equal(logits, before)
    # A sequence with edits has left again.
    params = SamplingRules(repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=3)
    batch.enter(5, _Sequence(params, [1, 2], 2))
    assert batch.gather([0, 1]).edits is None
    assert batch.gather([0, 5]).edits is not None
    batch.leave(5)
    assert batch.gather([0, 1]).edits is None


def test_penalties_on_output_do_not_hold_the_prompt() -> None:
    """Their cost grows with the output only."""
    batch = _Batch()
    prompt = list(range(20))
    batch.enter(0, _Sequence(SamplingRules(presence_penalty=1.0), prompt, 20))
    batch.enter(1, _Sequence(SamplingRules(presence_penalty=1.0), prompt, 20))
    batch.append([0, 1], [3, 4])
    edits = batch.gather([0, 1]).edits
    assert set(edits.penalties.tokens.ids.flatten().tolist()) == {3, 4}
    assert edits.penalties.tokens.ids.shape[1] <= 2


def test_a_processor_keeps_logits_of_its_own() -> None:
    """The tensor that it gets holds one row, and no later edit changes it."""
    logits_processors.kept.clear()
    batch = _Batch()
    keep = "support.logits_processors:keep"
    params = SamplingRules(logit_bias={3: 5.0}, logits_processors=[keep])
    batch.enter(0, _Sequence(params, [1], 1))
    batch.enter(1, _Sequence(params, [1], 1))
    logits = torch.randn(2, VOCAB_SIZE)
    sample(logits.clone(), batch.gather([0, 1]))
    assert torch.equal(torch.stack(logits_processors.kept), logits)
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in logits_processors.kept)


def test_a_row_without_a_token_names_its_own_rule() -> None:
    batch = _Batch()
    none_left = {"allowed_token_ids": [4], "bad_words_token_ids": [[4]]}
    processed = none_left | {"logits_processors": ["support.logits_processors:keep"]}
    for slot, rules in enumerate(({}, none_left, processed)):
        batch.enter(slot, _Sequence(SamplingRules(temperature=0, **rules), [1], 1))
    gathered = batch.gather([0, 1, 2])
    masks: Future[FilledMasks] = Future()
    masks.set_result(FilledMasks(np.zeros((1, 4), np.int32), {}))
    gathered.edits.masks = TokenMasks(np.array([0]), masks)
    errors = sample(torch.zeros(3, VOCAB_SIZE), gathered).findings.now().errors
    fields = [errors[row].field for row in range(3)]
    assert fields == ["structured_outputs", "allowed_token_ids", None]


def test_bias_is_not_rounded_to_the_models_dtype() -> None:
    batch = _Batch()
    batch.enter(0, _Sequence(SamplingRules(temperature=0, logit_bias={9: 0.02}), [1], 1))
    logits = torch.full((1, VOCAB_SIZE), 20.0, dtype=torch.bfloat16)
    assert sample(logits, batch.gather([0])).token_ids.tolist() == [9]
