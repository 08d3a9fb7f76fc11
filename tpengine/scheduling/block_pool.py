"""A pool of equal cache blocks with reference counts, and blocks that are found by their content.

A block without a holder is free. If its content is known, it stays in a list in order of last use,
so that a later sequence with the same beginning finds it, until its place is needed (eviction).

The name of a block's content is a SHA-256 digest of the block's tokens, of the pictures that they
stand for, and of the digest of the block before it; before the first one stands the adapter and the
request's salt (`root_of`). So equal digests mean equal beginnings, and contents are not compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tpengine.errors import EngineError
from tpengine.messages import PictureSpan

_ROOT = b"tpengine"


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
        # Last in, first out: the block that was given back last is still in a processor's cache.
        # Without prefix caching, a CPU then touches no more pages of a large cache than were ever
        # needed at once.
        self._blank = list(reversed(range(num_blocks)))
        # Free and of known content, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a holder, whether or not their content is known."""
        return len(self._blank) + len(self._idle)

    def ref_count(self, block: int) -> int:
        """How many tables hold the block."""
        return self._ref_counts[block]

    def take(self, num_blocks: int) -> list[int]:
        """Gives blocks to one holder. Forgets contents only when no blank block is left.

        Raises:
            EngineError: too few blocks are free.
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
            del self._idle[block]  # KeyError: a blank block has no content to share
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Takes a block back from one of its holders; without a holder it is free.

        Raises:
            EngineError: the block has no holder.
        """
        if self._ref_counts[block] < 1:
            raise EngineError(f"block {block} is given back, but no table holds it")
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if block in self._digests:
                self._idle[block] = None
            else:
                self._blank.append(block)

    def copy_of(self, blocks: Iterable[int], pairs: dict[int, int]) -> list[int]:
        """Gives a holder blocks for the content of another pool's blocks.

        Args:
            pairs: this pool's block for each of the other pool's that has one, which is then
                shared; more are added.
        """
        own = []
        for block in blocks:
            if block in pairs:
                self.share(pairs[block])
            else:
                (pairs[block],) = self.take(1)
            own.append(pairs[block])
        return own

    def find(self, digest: bytes) -> int | None:
        """The block, held or free, that is known to have this content."""
        return self._by_digest.get(digest)

    def publish(self, block: int, digest: bytes) -> None:
        """Remembers a held block by its content, unless another block is known for the same.

        Two sequences may compute the same block at the same time. The second keeps its own copy,
        which becomes blank when it is given back.
        """
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Looks for lost and doubled blocks. Slow; meant for tests.

        Args:
            tables: all tables that hold blocks of this pool.

        Raises:
            EngineError: an invariant does not hold; the message names it.
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
    """Raises EngineError unless `holds`. Not an `assert`, which `python -O` removes."""
    if not holds:
        raise EngineError(f"an invariant of the scheduler does not hold: {invariant}")


def root_of(adapter_key: bytes | None, salt: str) -> bytes:
    """The digest that a first block has as its parent. A block is found only under its own root."""
    root = _ROOT if adapter_key is None else adapter_key
    return hashlib.sha256(root + salt.encode()).digest() if salt else root


def digest_of(parent: bytes, token_ids: list[int]) -> bytes:
    """Digest of a full block that follows the block whose digest is `parent`."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


@dataclass(slots=True)
class BlockChain:
    """Digests of a sequence's full blocks, from the first on, each computed once.

    Attributes:
        root: see `root_of`.
        num_published: how many of these blocks were offered to the pool, since their K and V are
            computed.
        pictures: of the prompt: their tokens have all the same id, so that their digests count.
    """

    root: bytes
    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0
    pictures: Sequence[PictureSpan] = ()

    def extend(self, token_ids: list[int], num_blocks: int, block_size: int) -> None:
        """Computes the missing digests of the first `num_blocks` blocks."""
        for index in range(len(self.digests), num_blocks):
            parent = self.digests[-1] if self.digests else self.root
            start, end = index * block_size, (index + 1) * block_size
            for span in self.pictures:
                if start < span.end and span.start < end:
                    place = f"{span.start - start} {span.num_tokens} {span.first_row} "
                    parent = hashlib.sha256(parent + place.encode() + span.digest).digest()
            self.digests.append(digest_of(parent, token_ids[start:end]))

    def fork(self, num_blocks: int) -> BlockChain:
        """The chain of a sequence that shares the first `num_blocks` blocks."""
        published = min(self.num_published, num_blocks)
        return BlockChain(self.root, self.digests[:num_blocks], published, self.pictures)
