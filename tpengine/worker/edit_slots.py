"""What edits the logits of the running sequences, by slot: penalties, rules about tokens, grammars.

Of a slot that asks for nothing nothing is kept, and a step in which no slot asks costs nothing.
`layers/logit_edits.py` applies the edits that are gathered here.
"""

from __future__ import annotations

import numpy as np
import torch

from tpengine.layers.device_values import Int32, Int64, upload
from tpengine.layers.logit_edits import LogitEdits, Penalties, TokenCounts
from tpengine.messages import NewSequence
from tpengine.structured.masks import GrammarSlots
from tpengine.worker.draft_rows import num_drafts_before
from tpengine.worker.token_rules import TokenRules


class EditSlots:
    """The edits that slots ask for.

    Attributes:
        grammars: of the slots whose output follows one.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.grammars = GrammarSlots()
        self._device = device
        self._rules = TokenRules(device)
        self._counts = TokenCounts(max_num_seqs, device)
        self._has_penalties = np.zeros(max_num_seqs, np.bool_)
        self._repetition = np.ones(max_num_seqs, np.float32)
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)

    @property
    def is_empty(self) -> bool:
        """Whether no slot has edits."""
        return self._rules.is_empty and self._counts.is_empty and self.grammars.is_empty

    def __contains__(self, slot: int) -> bool:
        return bool(self._has_penalties[slot]) or slot in self._rules or slot in self.grammars

    def write(self, slot: int, sequence: NewSequence) -> None:
        """Writes what a sequence that enters asks for."""
        rules = sequence.rules
        self._rules.write(slot, sequence)
        self.grammars.write(slot, sequence)
        self._has_penalties[slot] = rules.has_penalties
        self._repetition[slot] = rules.repetition_penalty
        self._frequency[slot] = rules.frequency_penalty
        self._presence[slot] = rules.presence_penalty
        self._num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.rewrite(slot, np.array(sequence.token_ids, np.int32))

    def rewrite(self, slot: int, token_ids: Int32) -> None:
        """Counts a sequence's tokens again, after the driver has replaced one.

        Args:
            token_ids: prompt and output.
        """
        if self._has_penalties[slot]:
            self._counts.write(slot, *self._penalised(slot, token_ids))
        else:
            self._counts.clear(slot)

    def append(self, slots: Int64, sampled: Int64, token_ids: Int32, num_tokens: Int32) -> None:
        """Counts a token that was sampled for each of `slots`.

        Args:
            token_ids: `[max_num_seqs, max_model_len]`, tokens of every slot.
            num_tokens: `[max_num_seqs]`, how many of them came before.
        """
        if self._counts.is_empty:
            return

        def count_distinct(slot: int) -> int:
            tokens = self._penalised(slot, token_ids[slot, : num_tokens[slot]])
            return len(np.unique(np.concatenate(tokens)))

        self._counts.append(slots, sampled, count_distinct)

    def _penalised(self, slot: int, token_ids: Int32) -> tuple[Int32, Int32]:
        """Returns the tokens of prompt and output that the slot's penalties count."""
        prompt, output = np.split(token_ids, [self._num_prompt_tokens[slot]])
        if self._repetition[slot] == 1.0:
            prompt = prompt[:0]  # the other penalties count the output only
        return prompt, output

    def fork(self, parent_slot: int, child_slot: int) -> None:
        """Gives a child the edits of its parent."""
        columns = (self._has_penalties, self._repetition, self._frequency, self._presence)
        for column in (*columns, self._num_prompt_tokens):
            column[child_slot] = column[parent_slot]
        self._counts.fork(parent_slot, child_slot)
        self._rules.fork(parent_slot, child_slot)
        self.grammars.fork(parent_slot, child_slot)

    def clear(self, slot: int) -> None:
        """Removes a slot's edits."""
        self._has_penalties[slot] = False
        self._counts.clear(slot)
        self._rules.clear(slot)
        self.grammars.clear(slot)

    def gather(self, slots: Int64, positions: Int32, token_ids: Int32) -> LogitEdits | None:
        """Collects the edits of one step's samples, see `SamplingSlots.gather`; None: there are
        none."""
        if self.is_empty:
            return None
        edits = self._rules.edits(slots, positions, token_ids)
        edits.masks = self.grammars.begin_masks(slots, positions, token_ids)
        edits.penalties = self._penalties(slots, positions, token_ids)
        return None if edits.is_empty else edits

    def _penalties(self, slots: Int64, positions: Int32, token_ids: Int32) -> Penalties | None:
        rows = np.flatnonzero(self._has_penalties[slots])
        if len(rows) == 0:
            return None
        penalised, ends = slots[rows], positions[rows]
        counts = num_drafts_before(penalised)
        # The first draft of each row that has one, then the second of each that has two, and so on.
        drafts = [
            (later, token_ids[penalised[later], (ends - counts)[later] + number].astype(np.int64))
            for number in range(counts.max())
            if (later := np.flatnonzero(counts > number)).size
        ]
        return Penalties(
            rows=upload(rows, self._device),
            tokens=self._counts.gather(penalised, drafts),
            repetition=upload(self._repetition[penalised], self._device),
            frequency=upload(self._frequency[penalised], self._device),
            presence=upload(self._presence[penalised], self._device),
        )
