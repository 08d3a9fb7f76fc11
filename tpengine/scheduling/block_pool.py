"""Equal blocks with reference counts, some of which are remembered by what they hold.

A block that nobody holds is free. If its content is known it waits among the free ones in order of
its last use, so that a later sequence with the same beginning finds it, until the place is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tpengine.errors import EngineError


class BlockPool:
    """Blocks 0 to `num_blocks - 1`, on a device or on the host.

    Attributes:
        num_hits: blocks that were found by their content.
        num_evictions: blocks whose content was forgotten because the place was needed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_hits = 0
        self.num_evictions = 0
        # Last in, first out: the block that was just given back is still in a processor's cache,
        # and without prefix caching no more pages of a large cache are touched, on CPU, than were
        # ever needed at once.
        self._blank = list(reversed(range(num_blocks)))
        # Free and of known content, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, whether or not their content is known."""
        return len(self._blank) + len(self._idle)

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        return self._ref_counts[block]

    def take(self, num_blocks: int) -> list[int]:
        """Gives blocks to one holder; contents are forgotten only when no blank block is left.

        Raises:
            EngineError: too few are free.
        """
        if num_blocks > self.num_free:
            raise EngineError(
                f"{num_blocks} blocks are wanted and {self.num_free} of {self.num_blocks} are free"
            )
        blocks = []
        for _ in range(num_blocks):
            block = self._blank.pop() if self._blank else self._evict()
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Gives a block to one more holder."""
        if self._ref_counts[block] == 0:
            del self._idle[block]  # KeyError: a blank block has nothing to share
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Takes a block back from one of its holders.

        Raises:
            EngineError: nobody holds it.
        """
        if self._ref_counts[block] < 1:
            raise EngineError(f"block {block} is given back, but nobody holds it")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._digests:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def find(self, digest: bytes) -> int | None:
        """The block, held or free, that is known to have this content."""
        return self._by_digest.get(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """Remembers a held block by its content, unless another one is known for the same.

        Two sequences may compute the same block at the same time. The second keeps its own copy,
        which goes blank when it is given back.
        """
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Looks for lost and doubled blocks. Takes time that grows with the pool.

        Raises:
            EngineError: what does not hold.
        """
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        expect(counts == self._ref_counts, "reference counts are the number of holders")
        free = set(self._blank) | set(self._idle)
        expect(len(free) == self.num_free, "no block is free twice")
        held = {block for block, count in enumerate(counts) if count}
        expect(not free & held, "no block is both free and held")
        expect(len(free) + len(held) == self.num_blocks, "free and held add up to all")
        by_digest = {digest: block for block, digest in self._digests.items()}
        expect(by_digest == self._by_digest, "each known content is that of one block")
        expect(not self._digests.keys() & set(self._blank), "blank blocks have no known content")
        expect(self._idle.keys() <= self._digests.keys(), "idle blocks have known content")

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._by_digest[self._digests.pop(block)]
        self.num_evictions += 1
        return block


def expect(holds: bool, invariant: str) -> None:
    """Raises EngineError unless `holds`; not an assert, which would vanish under `python -O`."""
    if not holds:
        raise EngineError(f"block manager: it does not hold that {invariant}")
