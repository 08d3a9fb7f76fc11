"""Which cache blocks belong to which sequence.

Paging as in "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(Kwon et al., 2023): the cache is a pool of equal blocks, and a sequence holds a table of block ids
in the order of its tokens. Sequences of one request share the blocks of their common beginning, and
requests share full blocks of equal content. Only bookkeeping happens here; no tensor is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tpengine.errors import CacheSizeError, EngineError
from tpengine.scheduling.allocation import AllocStatus, BlockPair, Growth
from tpengine.scheduling.block_pool import BlockPool, expect
from tpengine.scheduling.groups import num_common_tokens
from tpengine.scheduling.prefix_cache import BlockChain
from tpengine.sequence import Request, Sequence, SequenceStatus


class BlockManager:
    """Block tables over a pool of device blocks and one of host blocks.

    Args:
        num_device_blocks: blocks in the pool, at least 1.
        block_size: tokens in a block.
        watermark: share of the pool that admission leaves free, so that a request which has just
            been let in is not preempted by the next token of those that run already.
        num_host_blocks: blocks for what is swapped out.
        enable_prefix_caching: whether full blocks are found again by their content.

    Raises:
        CacheSizeError: the pool is empty.
    """

    def __init__(
        self,
        num_device_blocks: int,
        block_size: int,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = False,
    ) -> None:
        if num_device_blocks < 1 or block_size < 1:
            raise CacheSizeError(
                f"the KV cache has {num_device_blocks} blocks of {block_size} tokens, and needs at "
                "least 1 of each; give it more memory"
            )
        self.block_size = block_size
        self.num_total_blocks = num_device_blocks
        self.device = BlockPool(num_device_blocks)
        self.host = BlockPool(num_host_blocks)
        self._num_watermark_blocks = int(watermark * num_device_blocks)
        self._tables: dict[int, list[int]] = {}
        self._host_tables: dict[int, list[int]] = {}
        # Of those that hold blocks, and of those that wait and were asked about; None: no caching.
        self._chains: dict[int, BlockChain] | None = {} if enable_prefix_caching else None

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that no sequence holds."""
        return self.device.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_needed_blocks(self, request: Request) -> int:
        """Blocks for all tokens that the request's unfinished sequences have now, their common
        beginning counted once."""
        sequences = request.unfinished_sequences
        common = num_common_tokens(sequences)
        if all(sequence.num_tokens == common for sequence in sequences):
            return self.num_blocks_for(common)
        shared = common // self.block_size
        return shared + sum(self.num_blocks_for(s.num_tokens) - shared for s in sequences)

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the request, which holds no blocks, can be given all it needs."""
        needed = self.num_needed_blocks(request)
        if needed > self.num_total_blocks:
            return AllocStatus.NEVER
        # With the whole pool free there is nobody to leave room for: without this exception, a
        # request that needs nearly the whole pool would wait forever.
        if self._tables:
            # Sequences that are still equal part with their next token.
            needed += self._num_watermark_blocks + len(request.unfinished_sequences) - 1
        held = sum(self.device.ref_count(block) > 0 for block in self._cached_blocks(request))
        return AllocStatus.OK if self.num_free_blocks >= needed - held else AllocStatus.LATER

    def allocate(self, request: Request) -> list[int]:
        """Gives the first unfinished sequence of a request blocks for all its tokens; those that
        the cache knows from others count as computed.

        Returns:
            A copy of its table.

        Raises:
            EngineError: it holds blocks already, or the pool has too few; `can_allocate` knows.
        """
        sequence = request.unfinished_sequences[0]
        if sequence.seq_id in self._tables:
            raise EngineError(f"sequence {sequence.seq_id} holds blocks already")
        cached = self._cached_blocks(request)
        # Held first, so that making room for the others does not evict them.
        for block in cached:
            self.device.share(block)
        self.device.num_hits += len(cached)
        table = cached + self.device.take(self.num_blocks_for(sequence.num_tokens) - len(cached))
        self._tables[sequence.seq_id] = table
        if self._chains is not None:
            chain = self._chains.setdefault(sequence.seq_id, BlockChain())
            chain.num_published = len(cached)
        sequence.num_computed_tokens = len(cached) * self.block_size
        return table.copy()

    def num_lacking_blocks(self, request: Request) -> int:
        """Blocks that the request's running sequences need before all their tokens have a place of
        their own.

        Asked of every running request in every step, and nearly always 0.
        """
        lacking = 0
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                capacity = len(self._tables[sequence.seq_id]) * self.block_size
                if capacity < len(sequence.token_ids):
                    lacking += self.num_blocks_for(len(sequence.token_ids) - capacity)
        if len(request.sequences) > 1:
            running = [s for s in request.sequences if s.status is SequenceStatus.RUNNING]
            lacking += _num_copies(self._shared_tails(self._tables, self.device, running))
        return lacking

    def num_held_blocks(self, request: Request) -> int:
        """Device blocks that the request's sequences hold, each counted once."""
        return len({b for s in request.sequences for b in self._tables.get(s.seq_id, ())})

    def append(self, sequence: Sequence, num_more: int = 0) -> Growth:
        """Lengthens the sequence's table until all its tokens, and so many more, have a place, and
        gives it a copy of its partly filled block if others hold that too.

        Raises:
            EngineError: it holds no table, or the pool has too few blocks; `num_lacking_blocks`
                and `num_free_blocks` know.
        """
        table = self._table(sequence)
        num_needed = self.num_blocks_for(sequence.num_tokens + num_more)
        blocks = self.device.take(max(0, num_needed - len(table)))
        table.extend(blocks)
        place, filled = divmod(sequence.num_computed_tokens, self.block_size)
        if not filled or self.device.ref_count(table[place]) == 1:
            return Growth(blocks)
        (own,) = self.device.take(1)
        shared, table[place] = table[place], own
        self.device.release(shared)
        return Growth(blocks, (shared, own), place)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Lets the child hold the parent's blocks of the first `num_tokens` tokens, which are
        computed, instead of any that it held before."""
        shared = self._table(parent)[: self.num_blocks_for(num_tokens)]
        for block in shared:
            self.device.share(block)
        if child.seq_id in self._tables:
            self.free(child)
        self._tables[child.seq_id] = shared
        if self._chains is not None:
            chain = self._chains[parent.seq_id]
            self._chains[child.seq_id] = chain.fork(num_tokens // self.block_size)

    def mark_computed(self, sequence: Sequence) -> None:
        """Lets others find the sequence's full blocks; called when another one has been filled."""
        if self._chains is None:
            return
        chain = self._chains[sequence.seq_id]
        num_full = sequence.num_computed_tokens // self.block_size
        chain.extend(sequence.token_ids, num_full, self.block_size)
        table = self._tables[sequence.seq_id]
        for index in range(chain.num_published, num_full):
            self.device.publish(table[index], chain.digests[index])
        chain.num_published = max(chain.num_published, num_full)

    def can_swap_out(self, request: Request) -> bool:
        """Whether host blocks are free for all that the request's sequences have computed."""
        held = {b for s in request.unfinished_sequences for b in self._computed_blocks(s)}
        return 0 < len(held) <= self.host.num_free

    def swap_out(self, request: Request) -> list[BlockPair]:
        """Moves the request's tables to host blocks; (device, host) pairs say what to copy."""
        pairs: dict[int, int] = {}
        for sequence in request.unfinished_sequences:
            host_table = []
            for block in self._computed_blocks(sequence):
                if block in pairs:
                    self.host.share(pairs[block])
                else:
                    (pairs[block],) = self.host.take(1)
                host_table.append(pairs[block])
            self._host_tables[sequence.seq_id] = host_table
        for sequence in request.unfinished_sequences:
            self._drop_table(sequence)
        return list(pairs.items())

    def can_swap_in(self, request: Request) -> AllocStatus:
        """Whether device blocks can be had for a swapped request, its next tokens included."""
        sequences = request.unfinished_sequences
        tables = [self._host_tables[s.seq_id] for s in sequences]
        needed = len({block for table in tables for block in table})
        for sequence, table in zip(sequences, tables, strict=True):
            needed += self.num_blocks_for(sequence.num_tokens) - len(table)
        needed += _num_copies(self._shared_tails(self._host_tables, self.host, sequences))
        if needed > self.num_total_blocks:
            return AllocStatus.NEVER
        keep = self._num_watermark_blocks if self._tables else 0
        return AllocStatus.OK if self.num_free_blocks - needed >= keep else AllocStatus.LATER

    def swap_in(self, request: Request) -> list[BlockPair]:
        """Moves the request's tables back to the device; (host, device) pairs say what to copy."""
        pairs: dict[int, int] = {}
        for sequence in request.unfinished_sequences:
            table = []
            for block in self._host_tables.pop(sequence.seq_id):
                if block in pairs:
                    self.device.share(pairs[block])
                else:
                    (pairs[block],) = self.device.take(1)
                table.append(pairs[block])
                self.host.release(block)
            self._tables[sequence.seq_id] = table
        return list(pairs.items())

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's table back, on the device or on the host, and the blocks that
        nobody else holds.

        Raises:
            EngineError: it holds no table, so this would free twice.
        """
        if sequence.seq_id in self._host_tables:
            for block in self._host_tables.pop(sequence.seq_id):
                self.host.release(block)
        else:
            self._drop_table(sequence)
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drops what was noted of a sequence that holds no blocks and will not come back."""
        if self._chains is not None:
            self._chains.pop(sequence.seq_id, None)

    def holds_blocks(self, sequence: Sequence) -> bool:
        """Whether the sequence has a table, on the device or on the host."""
        return sequence.seq_id in self._tables or sequence.seq_id in self._host_tables

    def block_ids(self, sequence: Sequence) -> list[int]:
        """A copy of the sequence's table; empty when it holds no device blocks."""
        return self._tables.get(sequence.seq_id, []).copy()

    def num_unused_places(self, sequences: Iterable[Sequence]) -> int:
        """Places for tokens in held blocks that no token has; counts a shared block once."""
        used: dict[int, int] = {}
        for sequence in sequences:
            table, left = self._tables.get(sequence.seq_id, ()), sequence.num_tokens
            for block in table:
                used[block] = max(used.get(block, 0), min(left, self.block_size))
                left -= self.block_size
        return len(used) * self.block_size - sum(used.values())

    def check_invariants(
        self, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()
    ) -> None:
        """Looks for lost, doubled and missing blocks. Takes time that grows with the pool.

        Args:
            running: all that should hold device blocks.
            swapped: all that should hold host blocks.

        Raises:
            EngineError: what does not hold.
        """
        holders = {sequence.seq_id: sequence for sequence in running}
        expect(holders.keys() == self._tables.keys(), "tables are held by those that run")
        hosted = {sequence.seq_id for sequence in swapped}
        expect(hosted == self._host_tables.keys(), "host tables are held by those swapped out")
        self.device.check_invariants(self._tables.values())
        self.host.check_invariants(self._host_tables.values())
        for seq_id, sequence in holders.items():
            table = self._tables[seq_id]
            expect(
                len(table) * self.block_size >= sequence.num_computed_tokens,
                f"the table of sequence {seq_id} covers its computed tokens",
            )
            # A block that it filled in part may be shared: it is copied before it is written.
            blank = table[self.num_blocks_for(sequence.num_computed_tokens) :]
            expect(
                len(set(table)) == len(table)
                and all(self.device.ref_count(block) == 1 for block in blank),
                f"sequence {seq_id} alone writes the blocks that it will write",
            )

    def _table(self, sequence: Sequence) -> list[int]:
        try:
            return self._tables[sequence.seq_id]
        except KeyError:
            raise EngineError(f"sequence {sequence.seq_id} holds no blocks") from None

    def _drop_table(self, sequence: Sequence) -> None:
        # The end first: what many share is at the beginning, and is evicted last.
        for block in reversed(self._table(sequence)):
            self.device.release(block)
        del self._tables[sequence.seq_id]

    def _computed_blocks(self, sequence: Sequence) -> list[int]:
        return self._table(sequence)[: self.num_blocks_for(sequence.num_computed_tokens)]

    def _cached_blocks(self, request: Request) -> list[int]:
        """Blocks of known content that a waiting request begins with. At least the last token that
        its sequences have in common remains to be computed, for what follows it is wanted."""
        if self._chains is None or request.sampling_params.prompt_logprobs is not None:
            return []
        sequences = request.unfinished_sequences
        num_blocks = (num_common_tokens(sequences) - 1) // self.block_size
        chain = self._chains.setdefault(sequences[0].seq_id, BlockChain())
        chain.extend(sequences[0].token_ids, num_blocks, self.block_size)
        found = []
        for digest in chain.digests[:num_blocks]:
            block = self.device.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def _shared_tails(
        self, tables: dict[int, list[int]], pool: BlockPool, sequences: list[Sequence]
    ) -> list[tuple[int, int]]:
        """(sequences that are about to write it, all that hold it) of each partly filled block."""
        writers: Counter[int] = Counter()
        for sequence in sequences:
            place, filled = divmod(sequence.num_computed_tokens, self.block_size)
            if filled:
                writers[tables[sequence.seq_id][place]] += 1
        return [(count, pool.ref_count(block)) for block, count in writers.items()]


def _num_copies(shared_tails: list[tuple[int, int]]) -> int:
    """Whoever writes last has the block to itself, if all holders write."""
    return sum(min(num_writers, num_holders - 1) for num_writers, num_holders in shared_tails)
