"""The blocks of the running batch's encoder prompts, by slot."""

from __future__ import annotations

import numpy as np

from tpengine.layers.device_values import Int32, Int64
from tpengine.messages import CrossInput


class CrossSlots:
    """Of each sequence the blocks to which its tokens attend beside its own.

    Args:
        max_blocks: of a prompt; 0: the model has one half.

    Attributes:
        block_table: int32 `[max_num_seqs, max_blocks]`.
        lengths: int32 `[max_num_seqs]`, tokens of the encoder prompt.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int32)

    def enter(self, slot: int, cross: CrossInput | None) -> None:
        """Notes the blocks of a sequence that enters a slot."""
        if cross is not None:
            self.block_table[slot, : len(cross.block_ids)] = cross.block_ids
            self.lengths[slot] = cross.num_tokens

    def fork(self, parent: int, child: int) -> None:
        """Gives a slot the blocks of another one."""
        self.block_table[child] = self.block_table[parent]
        self.lengths[child] = self.lengths[parent]

    def rows(self, token_slots: Int64) -> tuple[Int32, Int32] | None:
        """Returns block table and length of each token, by its slot; None: the model has one
        half."""
        if not self.block_table.shape[1]:
            return None
        return self.block_table[token_slots], self.lengths[token_slots]
