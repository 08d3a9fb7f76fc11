"""Which cache blocks belong to which sequence.

Paging as in "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(Kwon et al., 2023): the cache is a pool of equal blocks, and a sequence holds a table of block ids
in the order of its tokens. Only bookkeeping happens here; no tensor is touched.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from tpengine.errors import CacheSizeError, EngineError
from tpengine.sequence import Request, Sequence, SequenceStatus


class AllocStatus(enum.Enum):
    """Whether blocks can be had for a waiting request."""

    OK = "ok"
    LATER = "later"
    """Not now, but once others have given blocks back."""
    NEVER = "never"
    """It needs more blocks than the whole pool has."""


class BlockManager:
    """A pool of blocks with reference counts, and a block table per sequence.

    Args:
        num_device_blocks: blocks in the pool, at least 1.
        block_size: tokens in a block.
        watermark: share of the pool that admission leaves free, so that a request which has just
            been let in is not preempted by the next token of those that run already.

    Raises:
        CacheSizeError: the pool is empty.
    """

    def __init__(self, num_device_blocks: int, block_size: int, watermark: float = 0.01) -> None:
        if num_device_blocks < 1 or block_size < 1:
            raise CacheSizeError(
                f"the KV cache has {num_device_blocks} blocks of {block_size} tokens, and needs at "
                "least 1 of each; give it more memory"
            )
        self.block_size = block_size
        self.num_total_blocks = num_device_blocks
        self._num_watermark_blocks = int(watermark * num_device_blocks)
        # First in, first out: a block rests as long as possible before it is written again.
        self._free: deque[int] = deque(range(num_device_blocks))
        self._ref_counts = [0] * num_device_blocks
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_needed_blocks(self, request: Request) -> int:
        """Blocks for all tokens that the request's unfinished sequences have now."""
        return sum(self.num_blocks_for(s.num_tokens) for s in request.unfinished_sequences)

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the request, which holds no blocks, can be given all it needs."""
        needed = self.num_needed_blocks(request)
        if needed > self.num_total_blocks:
            return AllocStatus.NEVER
        # With the whole pool free there is nobody to leave room for: without this exception, a
        # request that needs nearly the whole pool would wait forever.
        keep = self._num_watermark_blocks if self._tables else 0
        return AllocStatus.OK if self.num_free_blocks - needed >= keep else AllocStatus.LATER

    def allocate(self, sequence: Sequence) -> list[int]:
        """Gives the sequence blocks for all its tokens, and returns a copy of its table.

        Raises:
            EngineError: it holds blocks already, or the pool has too few; `can_allocate` knows.
        """
        if sequence.seq_id in self._tables:
            raise EngineError(f"sequence {sequence.seq_id} holds blocks already")
        blocks = self._take(self.num_blocks_for(sequence.num_tokens))
        self._tables[sequence.seq_id] = blocks
        return blocks.copy()

    def num_lacking_blocks(self, request: Request) -> int:
        """Blocks that the request's running sequences need before all their tokens have a place.

        Asked of every running request in every step, and nearly always 0.
        """
        lacking = 0
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                capacity = len(self._tables[sequence.seq_id]) * self.block_size
                if capacity < len(sequence.token_ids):
                    lacking += self.num_blocks_for(len(sequence.token_ids) - capacity)
        return lacking

    def append(self, sequence: Sequence) -> list[int]:
        """Lengthens the sequence's table until all its tokens have a place.

        Returns:
            The blocks that are new, empty when there was room.

        Raises:
            EngineError: it holds no table, or the pool has too few blocks; `num_lacking_blocks`
                and `num_free_blocks` know.
        """
        table = self._table(sequence)
        blocks = self._take(self.num_blocks_for(sequence.num_tokens) - len(table))
        table.extend(blocks)
        return blocks

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's table back, and the blocks that nobody else holds.

        Raises:
            EngineError: it holds no table, so this would free twice.
        """
        for block in self._table(sequence):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
        del self._tables[sequence.seq_id]

    def block_ids(self, sequence: Sequence) -> list[int]:
        """A copy of the sequence's table; empty when it holds no blocks."""
        return self._tables.get(sequence.seq_id, []).copy()

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Looks for lost, doubled and missing blocks. Takes time that grows with the pool.

        Args:
            sequences: all that should hold blocks.

        Raises:
            EngineError: what does not hold.
        """
        holders = {sequence.seq_id: sequence for sequence in sequences}
        _expect(holders.keys() == self._tables.keys(), "tables are held by those that run")
        counts = [0] * self.num_total_blocks
        for table in self._tables.values():
            for block in table:
                counts[block] += 1
        _expect(counts == self._ref_counts, "reference counts are the number of holders")
        free = set(self._free)
        _expect(len(free) == len(self._free), "no block is free twice")
        held = {block for block, count in enumerate(counts) if count}
        _expect(not free & held, "no block is both free and held")
        _expect(len(free) + len(held) == self.num_total_blocks, "free and held add up to all")
        for seq_id, sequence in holders.items():
            table = self._tables[seq_id]
            first_written = sequence.num_computed_tokens // self.block_size
            _expect(
                len(table) * self.block_size >= sequence.num_computed_tokens,
                f"the table of sequence {seq_id} covers its computed tokens",
            )
            _expect(
                len(set(table)) == len(table)
                and all(counts[b] == 1 for b in table[first_written:]),
                f"sequence {seq_id} alone writes the blocks that it will write",
            )

    def _table(self, sequence: Sequence) -> list[int]:
        try:
            return self._tables[sequence.seq_id]
        except KeyError:
            raise EngineError(f"sequence {sequence.seq_id} holds no blocks") from None

    def _take(self, num_blocks: int) -> list[int]:
        if num_blocks > len(self._free):
            raise EngineError(
                f"{num_blocks} blocks are wanted and {len(self._free)} of "
                f"{self.num_total_blocks} are free"
            )
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks


def _expect(holds: bool, invariant: str) -> None:
    # Not an assert: the check must not vanish under `python -O`.
    if not holds:
        raise EngineError(f"block manager: it does not hold that {invariant}")
