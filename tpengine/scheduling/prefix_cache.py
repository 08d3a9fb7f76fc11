"""Names of blocks by content: a digest of the block's tokens and of all that precedes them.

SHA-256, chained from block to block, so that equal digests mean equal beginnings: no two different
ones are known, and contents are not compared beyond it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

_ROOT = b"tpengine"


def digest_of(parent: bytes, token_ids: list[int]) -> bytes:
    """Digest of a full block that follows the block (or the start) named `parent`."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


@dataclass(slots=True)
class BlockChain:
    """Digests of a sequence's full blocks, from the first on, each computed once.

    Attributes:
        num_published: how many of them have been offered to the pool, their K and V being there.
    """

    digests: list[bytes] = field(default_factory=list)
    num_published: int = 0

    def extend(self, token_ids: list[int], num_blocks: int, block_size: int) -> None:
        """Computes the digests that the first `num_blocks` blocks still lack."""
        for index in range(len(self.digests), num_blocks):
            parent = self.digests[-1] if self.digests else _ROOT
            ids = token_ids[index * block_size : (index + 1) * block_size]
            self.digests.append(digest_of(parent, ids))

    def fork(self, num_blocks: int) -> BlockChain:
        """The chain of a sequence that shares the first `num_blocks` blocks."""
        return BlockChain(self.digests[:num_blocks], min(self.num_published, num_blocks))
